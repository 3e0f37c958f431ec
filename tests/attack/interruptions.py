"""Runs that are broken off: Ctrl-C once and twice, and a process that reads images and dies.

Each must end without a traceback and leave only whole files; what can be resumed goes on to its end.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from attack.disk import whole
from attack.flags import Inputs, run_alone
from attack.outcome import ACCEPTED, REFUSED, Tally

RESUMED = ("search", "cosearch", "finetune", "train")
BROKEN_OFF = (*RESUMED, "eval", "compare", "export", "visualize")
READING = ("search", "cosearch", "finetune", "train", "eval", "compare")


def with_workers(arguments: list[str]) -> list[str]:
    place = arguments.index("--workers")
    return [*arguments[:place], "--workers", "2", *arguments[place + 2 :]]


def interrupted(after: float, again: float | None) -> Callable[[], None]:
    """Ctrl-C for the whole group, as a terminal sends it, and a second one so much later."""

    def press() -> None:
        time.sleep(after)
        os.killpg(os.getpid(), signal.SIGINT)
        if again is not None:
            time.sleep(again)
            os.killpg(os.getpid(), signal.SIGINT)

    return lambda: threading.Thread(target=press, daemon=True).start()


def kill_a_worker() -> None:
    """Kill the first process that this one starts."""

    def watch() -> None:
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        while not (found := children.read_text().split()):
            time.sleep(0.0005)
        os.kill(int(found[0]), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def ctrl_c(inputs: Inputs, folder: Path, each: int, seed: int = 0, only: Sequence[str] = BROKEN_OFF) -> Tally:
    """Every command `each` times, at random moments; every second time twice."""
    tally, chance = Tally(), random.Random(seed)
    for name in only:
        good = [name, *inputs.arguments((name,))]
        good = with_workers(good) if name in READING else good
        started = time.monotonic()
        code, said, _ = run_alone(folder / "work", good)
        assert code == 0, said
        lasts = time.monotonic() - started
        for number in range(each):
            moment, again = 0.1 + chance.random() * lasts, chance.choice((0.0, 0.001, 0.1))
            before = interrupted(moment, again if number % 2 else None)
            code, said, _ = run_alone(folder / "work", good, before=before)
            ended = {0: ACCEPTED, 130: REFUSED}.get(code, f"exit code {code}")
            tally.add(*gone_on(name, good, folder, ended, said))
    return tally


def dead_workers(inputs: Inputs, folder: Path, only: Sequence[str] = READING) -> Tally:
    """Every command that reads images by processes of its own, of which one dies."""
    tally = Tally()
    for name in only:
        good = with_workers([name, *inputs.arguments((name,))])
        code, said, _ = run_alone(folder / "work", good, before=kill_a_worker)
        ended = f"exit code {code}"
        if code == 2 and "a process that reads images has died" in said:
            ended = REFUSED
        tally.add(*gone_on(name, good, folder, ended, said))
    return tally


def gone_on(name: str, good: list[str], folder: Path, ended: str, said: str) -> tuple[str, str]:
    """How it ended, after a look at what it left, and after it was resumed."""
    work = folder / "work"
    left = [path for path in work.rglob("*") if path.is_file()]
    if "Traceback" in said:
        ended = "traceback"
    ended = next((f"half of {path.name}" for path in left if not whole(path)), ended)
    if name in RESUMED and ended in (ACCEPTED, REFUSED):
        kept = shutil.copytree(work / "new", folder / "kept", dirs_exist_ok=True) if left else None
        again = [str(kept) if argument == "new" and kept else argument for argument in good]
        resume = ["--resume"] if any((folder / "kept").rglob("config.json")) else []
        code, said, _ = run_alone(work, [*again, *resume])
        shutil.rmtree(folder / "kept", ignore_errors=True)
        ended = ended if code == 0 else f"not resumed: {code}"
    return ended, f"{name}: {[path.name for path in left]} {said[-900:]}"
