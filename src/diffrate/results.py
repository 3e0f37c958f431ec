"""Results as files: the one place that writes what a command measured, with what is needed to repeat it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import diffrate
from diffrate.devices import device_name
from diffrate.errors import DiffRateError
from diffrate.schedule import write_text


def write_results(
    path: str | os.PathLike[str], command: str, results: Mapping[str, Any], device: torch.device | None = None
) -> None:
    """Write `results` and their origin as JSON, whole or not at all."""
    record = {**origin(command, device), "results": dict(results)}
    write_text(Path(path), json.dumps(record, indent=2, allow_nan=False) + "\n")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Plain values as JSON, whole or not at all."""
    write_text(path, json.dumps(values, allow_nan=False) + "\n")


def origin(command: str, device: torch.device | None = None) -> dict[str, Any]:
    """What produced a result: command, code, libraries, machine and date."""
    return {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "diffrate": diffrate.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": version("timm"),
        "device": device_name(device or torch.device("cpu")),
    }


def in_words(made: Mapping[str, Any]) -> str:
    """Machine, code and day of an origin, for a line of text."""
    code = f"diffrate {made['diffrate']}"
    if made["commit"]:
        changed = ", with changes" if made["commit"].endswith("-dirty") else ""
        code = f"commit {made['commit'][:10]}{changed}"
    return f"{made['device']}, {code}, {made['date'][:10]}"


def commit() -> str | None:
    """The commit of the checkout that the package runs from, marked when it has changes; None when installed."""
    here = Path(__file__).parent
    # Tracked, and not merely inside: an installed package may lie in a folder of somebody else's repository.
    if _git(here, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git(here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def check_target(path: str | os.PathLike[str] | None) -> None:
    """Raise now what would otherwise stop a long run only when it writes its result."""
    if path is None:
        return
    target = Path(path)
    try:
        parent = next(folder for folder in target.absolute().parents if folder.exists())
        special = target.exists() and not target.is_file()
    except (OSError, ValueError) as error:  # a name that no file can have
        raise DiffRateError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    if special or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise DiffRateError(f"cannot write {path}")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
