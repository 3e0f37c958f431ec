"""Runs over several processes: what the others say when one of them dies, or when they are asked to stop."""

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


_under_way: tuple[str, Path | None] | None = None  # SIGTERM comes to a process, not to a function


@contextmanager
def together(processes: int, what: str, state: Path | None) -> Iterator[None]:
    """Turns the error that a process gets when another one dies into a sentence that says how to go on.

    what   the run in one word; `state` is the file from which it would be resumed.
    """
    global _under_way
    before, _under_way = _under_way, (what, state)
    try:
        yield
    except RuntimeError as error:
        if processes == 1 or not any(sign in str(error).lower() for sign in SIGNS):
            raise
        reason = re.sub(r"^\[\S*\] ", "", first_line(error)).split(". ")[
            0
        ]  # without gloo's file, line and wishes
        raise DiffRateError(
            f"another process of this {what} has ended ({reason}); {_way_on(state)}"
        ) from error
    _under_way = before  # not after an error, which has yet to be said


def asked_to_stop() -> str:
    """The sentence of one of several processes that SIGTERM ends; who sent it and why is not known."""
    what, way_on = ("run", "") if _under_way is None else (_under_way[0], f"; {_way_on(_under_way[1])}")
    return f"this {what} was asked to stop (SIGTERM), as launchers do when another process of it has ended{way_on}"


def _way_on(state: Path | None) -> str:
    saved = state is not None and state.is_file()
    return f"--resume goes on from {state}" if saved else "no state was saved yet"
