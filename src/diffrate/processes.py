"""Runs over several processes: what the others say when one of them dies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diffrate.errors import DiffRateError
from diffrate.models import first_line

SIGNS = (
    "gloo",
    "nccl",
    "connection closed",
    "connection reset",
    "timed out",
)  # of a collective that lost a peer


@contextmanager
def together(processes: int, what: str, state: Path | None) -> Iterator[None]:
    """Turns the error that a process gets when another one dies into a sentence that says how to go on.

    what   the run in one word; `state` is the file from which it would be resumed.
    """
    try:
        yield
    except RuntimeError as error:
        if processes == 1 or not any(sign in str(error).lower() for sign in SIGNS):
            raise
        saved = state is not None and state.is_file()
        there = f"--resume goes on from {state}" if saved else "no state was saved yet"
        reason = re.sub(r"^\[\S*\] ", "", first_line(error)).split(". ")[
            0
        ]  # without gloo's file, line and wishes
        raise DiffRateError(f"another process of this {what} has ended ({reason}); {there}") from error
