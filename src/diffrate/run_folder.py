"""The folder of a long run: what it was asked to do, and whether another run may go on there."""

from __future__ import annotations

import errno
import json
import os
import weakref
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from diffrate.errors import DiffRateError
from diffrate.schedule import write_text


class RunFolder:
    """A folder with config.json. A second run there must say that it resumes, and be asked for the same.

    what  the run in one word, for the sentences that refuse. Without a path nothing is written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        config: dict[str, Any],
        resume: bool,
        accelerator: Accelerator,
        what: str,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.main, self.resume = accelerator.is_main_process, resume
        if self.path is None:
            if resume:
                raise DiffRateError("there is nothing to resume without an output folder")
            return
        known = self.read("config.json")
        if known is not None and not resume:
            raise DiffRateError(
                f"{self.path} already holds a {what}: resume it (--resume), or choose another folder"
            )
        if resume and known is None:
            raise DiffRateError(f"{self.path} holds no {what} to resume")
        if known is not None:
            changed = [key for key in config if known.get(key) != json.loads(json.dumps(config[key]))]
            if changed:
                raise DiffRateError(
                    f"the {what} in {self.path} was started with another {', '.join(changed)}, or by another version"
                )
        accelerator.wait_for_everyone()  # every process has looked before the first one writes
        if known is None:
            self.write("config.json", config)
        if self.main and os.name == "posix":
            self._lock(what)

    def _lock(self, what: str) -> None:
        """Lock the folder for this process alone, so that two runs do not write into it in turns.

        The system takes the lock back when the process ends, however it ends; a worker that outlives it has none.
        """
        import fcntl

        assert self.path is not None
        file = os.open(self.path / "config.json", os.O_RDWR)
        weakref.finalize(self, os.close, file)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):  # otherwise the file system has no locks
                raise DiffRateError(
                    f"another {what} is at work in {self.path}: wait for it, or choose another folder"
                ) from error

    def write(self, name: str, values: dict[str, Any]) -> None:
        if self.path is not None and self.main:
            write_text(self.path / name, json.dumps(values) + "\n")

    def read(self, name: str) -> dict[str, Any] | None:
        assert self.path is not None
        try:
            values = json.loads((self.path / name).read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError("no object")
            return values
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise DiffRateError(f"cannot read {self.path / name}: {error}") from error
