"""Several benchmarks side by side on one GPU: all make ready together, which takes long, and are timed one at a time.

Each of N processes is started with `--turns FOLDER,N` (a new folder). What comes before a process's first timing runs
beside the others; it then waits until all N have come as far, or have ended, and from then on one works at a time.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

LONGEST_WAIT = 420.0  # seconds for the others


class Turns:
    def __init__(self, text: str) -> None:
        """text  FOLDER,N; without one nobody is waited for."""
        folder, _, count = text.rpartition(",")
        self.folder, self.count = Path(folder), int(count) if text else 0
        self.has_begun = not text
        if text:
            self.folder.mkdir(parents=True, exist_ok=True)
            atexit.register(self._come)  # one that fails before must not hold the others up

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within, this process alone works. After the first turn it keeps the GPU: what follows is part of it."""
        if not self.has_begun:
            self.has_begun = True
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._come()
            end = time.monotonic() + LONGEST_WAIT
            while len(list(self.folder.glob("*.ready"))) < self.count and time.monotonic() < end:
                time.sleep(0.1)
            if time.monotonic() >= end:
                print("others are not ready: they may run beside what is timed now", flush=True)
            self._lock = (self.folder / "lock").open("w")  # until the process ends
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        yield

    def _come(self) -> None:
        (self.folder / f"{os.getpid()}.ready").touch()
