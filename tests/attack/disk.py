"""Outputs that cannot be written: every command that writes, into a folder that is read-only and onto a full disk.

As root nothing is read-only: the process under attack first gives up the privileges that make it so. The full disk is a
small tmpfs, which only root can mount.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file

from attack.flags import Inputs, commands, judged, patience, run_alone
from attack.outcome import REFUSED, Tally

ROOMS = (0, 4, 8, 16, 64)  # KiB that the disk still has
PAGE = 4096


def unprivileged() -> None:
    """Give up the two capabilities by which root writes and reads whatever the permissions say."""

    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    class Sets(ctypes.Structure):
        _fields_ = (
            ("effective", ctypes.c_uint32),
            ("permitted", ctypes.c_uint32),
            ("inheritable", ctypes.c_uint32),
        )

    header, sets, libc = Header(0x20080522, 0), (Sets * 2)(), ctypes.CDLL(None, use_errno=True)
    both = ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    if libc.capget(ctypes.byref(header), sets):
        raise OSError(ctypes.get_errno(), "capget")
    sets[0].effective &= both
    sets[0].permitted &= both
    if libc.capset(ctypes.byref(header), sets):
        raise OSError(ctypes.get_errno(), "capset")


def writing(inputs: Inputs, place: Path, only: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Every command that writes, or those of them that are named, with what it writes at a place."""
    for words, command in commands():
        if only and " ".join(words) not in only:
            continue
        arguments = inputs.arguments(words)
        if any("--json" in parameter.opts for parameter in command.params):
            arguments = [*arguments, "--json", "new.json"]
        if any(argument.startswith("new") for argument in arguments):
            moved = [str(place / a) if a.startswith("new") else a for a in arguments]
            yield " ".join(words), [*words, *moved]


def read_only(inputs: Inputs, folder: Path, only: Sequence[str] = ()) -> Tally:
    """Each must be refused, and nothing be there."""
    tally = Tally()
    place = folder / "read-only"
    place.mkdir(mode=0o555)
    for name, arguments in writing(inputs, place, only):
        code, said, _ = run_alone(folder / "work", arguments, before=unprivileged)
        left = [str(path) for path in place.iterdir()]
        ended = judged("", arguments, code, said, left)
        if ended == REFUSED and "cannot write" not in said:
            ended = "refused for another reason"
        elif ended != REFUSED:
            ended = f"not refused: {ended}"
        tally.add(ended, f"{name}: {left} {said[-600:]}")
    return tally


def full(inputs: Inputs, folder: Path, rooms: Sequence[int] = ROOMS, only: Sequence[str] = ()) -> Tally:
    """Each must end well, or be refused; whatever file is there must be whole."""
    tally = Tally()
    for room in rooms:
        for name, arguments in writing(inputs, folder / "disk", only):
            with small_disk(folder / "disk", room):
                code, said, _ = run_alone(folder / "work", arguments, patience("", arguments))
                left = [path for path in (folder / "disk").rglob("*") if path.is_file()]
                ended = judged("", arguments, code, said, [])
                if any(path.name.startswith(".") for path in left):
                    ended = "left behind"
                ended = next((f"half of {path.name}" for path in left if not whole(path)), ended)
            tally.add(ended, f"{name}, {room} KiB: {said[-600:]}")
    return tally


@contextmanager
def small_disk(place: Path, room: int) -> Iterator[None]:
    """A file system with so many KiB left, and at least a page that is taken."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room + 4}k", "tmpfs", str(place)], check=True)
    try:
        (place / "taken.bin").write_bytes(bytes(PAGE))
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as name:
        try:
            with small_disk(Path(name) / "disk", 4):
                return True
        except (OSError, subprocess.SubprocessError):
            return False


def whole(path: Path) -> bool:
    try:
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            load_file(path)
        else:
            return os.path.getsize(path) > 0
    except Exception:
        return False
    return True
