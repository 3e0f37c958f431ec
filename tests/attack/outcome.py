"""What an attack may end in: it is accepted, or refused in a sentence. Everything else is a defect."""

from __future__ import annotations

import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from diffrate.errors import DiffRateError

LONGEST_SENTENCE = 1500
ACCEPTED, REFUSED = "accepted", "refused"


class HangError(BaseException):
    """Not an Exception, so that nothing under attack can swallow it."""


@dataclass
class Tally:
    """How many attacks there were, how they ended, and the first defects in full."""

    ended: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)

    def add(self, outcome: str, about: str) -> None:
        self.ended[outcome] += 1
        if outcome not in (ACCEPTED, REFUSED):
            self.defects.append(f"{outcome}: {about}")

    def to_dict(self) -> dict[str, object]:
        return {"attacks": self.ended.total(), **dict(self.ended), "defects": self.defects[:20]}


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Break off what takes longer: a hang is a defect too."""

    def stop(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(attack: Callable[[], object], seconds: float = 60.0) -> tuple[str, str]:
    """How it ended, and what was said."""
    try:
        with at_most(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attack()
    except DiffRateError as error:
        said = " ".join(str(error).split())
        good = 10 < len(said) <= LONGEST_SENTENCE and "Traceback" not in said
        return (REFUSED if good else "no sentence"), said
    except HangError:
        return "hang", ""
    except Exception as error:
        return type(error).__name__, "".join(traceback.format_exception(error)[-3:])
    return ACCEPTED, ""
