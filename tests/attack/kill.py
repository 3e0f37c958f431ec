"""kill -9 at random moments of a search and of a tuning: resumed, each must end where an undisturbed run ends."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import diffrate
from conftest import random_vit
from diffrate.errors import DiffRateError
from diffrate.schedule import Schedule
from diffrate.searching import report
from diffrate.training import FINETUNE, finetune

Job = Callable[[Path, bool], object]


def images(count: int = 24) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(3, 32, 32, generator=generator), i % 7) for i in range(count)]


def search(folder: Path, resume: bool) -> None:
    report.SAVE_SECONDS = (
        0.0  # a state after every step, so that a kill falls into the writing of one as well
    )
    diffrate.search(
        random_vit(), images(16), "60%", steps=6, batch_size=2, patience=100, progress=False, output=folder,
        resume=resume,
    )  # fmt: skip


def tune(folder: Path, resume: bool) -> None:
    schedule = Schedule((65, 50, 40, 30), (65, 45, 35, 20))
    recipe = replace(FINETUNE, epochs=3, batch_size=4, precision="no", ema_decay=0.9)
    finetune(random_vit(drop_path_rate=0.1), schedule, images(), images(8), folder, recipe, save_minutes=0.0,
             progress=False, resume=resume)  # fmt: skip


JOBS: dict[str, Job] = {"search": search, "finetune": tune}


def result(folder: Path) -> Any:
    """All that must not depend on what happened on the way."""
    found = {file.name: Schedule.load(file).to_dict() for file in sorted(folder.glob("schedule*.json"))}
    if (folder / "history.json").exists():
        return found, json.loads((folder / "history.json").read_text())["steps"]
    return {name: load_file(folder / name) for name in ("weights.safetensors", "last.safetensors")}


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict) and ours and isinstance(next(iter(ours.values())), dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, dict) and all(isinstance(value, torch.Tensor) for value in ours.values()):
        return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    return bool(ours == theirs)


def apart(job: Callable[[], object], kill_after: float | None = None) -> int:
    """Run in a process of its own, killed after so many seconds: its exit code, below 0 for a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of newer Pythons, about forks
        child = os.fork()
    if child == 0:
        code = 130
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            job()
            code = 0
        except DiffRateError:
            code = 2
        except Exception:
            code = 1
        finally:  # an interruption leaves 130
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def go_on(job: Job, folder: Path, kill_after: float | None = None) -> int:
    """Start, or resume where there is something to resume."""
    return apart(lambda: job(folder, (folder / "config.json").exists()), kill_after)


def attack(name: str, folder: Path, kills: int, seed: int = 0) -> dict[str, Any]:
    """`kills` kills, up to three in one run, each resumed; how many runs ended in the undisturbed result."""
    job, chance = JOBS[name], random.Random(seed)
    started = time.monotonic()
    assert go_on(job, folder / "whole") == 0
    lasts = time.monotonic() - started
    expected = result(folder / "whole")
    runs, good, done, ended_before, states = 0, 0, 0, 0, 0
    while done < kills:
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        for _ in range(min(chance.randint(1, 3), kills - done)):
            code = go_on(job, work, chance.uniform(0.05, 1.0) * lasts)
            done += code == -signal.SIGKILL
            ended_before += code == 0
            states += any(work.glob("state.*"))
        runs += 1
        good += go_on(job, work) == 0 and same(result(work), expected)
    return {"kills": done, "after_a_state_was_saved": states, "ended_before_the_kill": ended_before, "runs": runs,
            "runs_with_the_undisturbed_result": good, "seconds_undisturbed": round(lasts, 2)}  # fmt: skip


def with_small_files(job: Job, folder: Path, most: int) -> int:
    """As on a full disk: no file may grow beyond so many bytes."""

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        job(folder, False)

    return apart(limited)


if __name__ == "__main__":
    import tempfile

    torch.set_num_threads(1)
    for name in JOBS:
        with tempfile.TemporaryDirectory() as folder:
            print(name, json.dumps(attack(name, Path(folder), int(sys.argv[1]))), flush=True)
