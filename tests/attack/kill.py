"""kill -9 at random moments of a search, a tuning and a co-search, on one process and on two: resumed, each must end
where an undisturbed run ends.

Processes are forked off this one, which has imported everything, so that most kills fall into the run itself. Two of
them talk by gloo, as under torchrun: one is killed or both, and who is left must end by itself, with a sentence.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.figure  # noqa: F401 - for the plots of a search
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

import diffrate
from conftest import random_vit
from diffrate.errors import DiffRateError
from diffrate.schedule import Schedule
from diffrate.searching import report
from diffrate.training import FINETUNE, finetune

GRACE = 30.0  # seconds in which a process that lost the other must end by itself

Job = Callable[[Path, bool], object]


def images(count: int = 24) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(3, 32, 32, generator=generator), i % 7) for i in range(count)]


def search(folder: Path, resume: bool) -> None:
    # A state after every step, so that a kill falls into the writing of one as well.
    report.SAVE_SECONDS = 0.0
    diffrate.search(
        random_vit(), images(16), "60%", steps=6, batch_size=2, patience=100, progress=False, output=folder,
        resume=resume, accelerator=Accelerator(cpu=True),
    )  # fmt: skip


def tune(folder: Path, resume: bool) -> None:
    schedule = Schedule((65, 50, 40, 30), (65, 45, 35, 20))
    recipe = replace(FINETUNE, epochs=3, batch_size=4, precision="no", ema_decay=0.9)
    finetune(random_vit(drop_path_rate=0.1), schedule, images(), images(8), folder, recipe, save_minutes=0.0,
             progress=False, resume=resume, accelerator=Accelerator(cpu=True))  # fmt: skip


def cosearch(folder: Path, resume: bool) -> None:
    report.SAVE_SECONDS = 0.0
    diffrate.cosearch(
        random_vit(), images(16), "60%,0.5ms", rounds=2, hardware_steps=4, largest_array=8, steps=3, batch_size=2,
        progress=False, output=folder, resume=resume, accelerator=Accelerator(cpu=True),
    )  # fmt: skip


JOBS: dict[str, Job] = {"search": search, "finetune": tune, "cosearch": cosearch}


def result(folder: Path) -> Any:
    """All that must not depend on what happened on the way."""
    found = {file.name: Schedule.load(file).to_dict() for file in sorted(folder.glob("schedule*.json"))}
    if (folder / "design.json").exists():
        design, history = (
            json.loads((folder / name).read_text()) for name in ("design.json", "history.json")
        )
        return found, design, history
    if (folder / "history.json").exists():
        return found, json.loads((folder / "history.json").read_text())["steps"]
    return {name: load_file(folder / name) for name in ("weights.safetensors", "last.safetensors")}


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict) and ours and isinstance(next(iter(ours.values())), dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, dict) and all(isinstance(value, torch.Tensor) for value in ours.values()):
        return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    return bool(ours == theirs)


def forked(job: Callable[[], object], **environment: str) -> int:
    """The id of a process that runs the job: it ends with 2 after a sentence, 1 after any other error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of newer Pythons, about forks
        child = os.fork()
    if child:
        return child
    code = 130
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.environ.update(environment)
        AcceleratorState._reset_state(reset_partial_state=True)  # what the parent has of it is one process
        job()
        code = 0
    except DiffRateError:
        code = 2
    except Exception:
        code = 1
    finally:  # an interruption leaves 130
        os._exit(code)


def start(job: Callable[[], object], processes: int = 1) -> list[int]:
    if processes == 1:
        return [forked(job)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"LOCAL_WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    return [forked(job, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(processes)]


def apart(job: Callable[[], object], kill_after: float | None = None) -> int:
    """Run in a process of its own, killed after so many seconds: its exit code, below 0 for a signal."""
    (child,) = start(job)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def go_on(
    job: Job,
    folder: Path,
    processes: int = 1,
    kill_after: float | None = None,
    victims: tuple[int, ...] = (0,),
) -> list[int | None]:
    """Start, or resume where there is something to resume: exit codes, None for one that had to be stopped."""
    resume = any(folder.glob("**/config.json"))
    children = start(lambda: job(folder, resume), processes)
    if kill_after is not None:
        time.sleep(kill_after)
        for victim in victims:
            os.kill(children[victim], signal.SIGKILL)
    until = time.monotonic() + (GRACE if kill_after is not None else 20 * GRACE)
    codes: dict[int, int | None] = {}
    while len(codes) < processes:
        for child in children:
            ended, status = (0, 0) if child in codes else os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif child not in codes and time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                codes[child] = None
        time.sleep(0.01)
    return [codes[child] for child in children]


def attack(name: str, folder: Path, kills: int, processes: int = 1, seed: int = 0) -> dict[str, Any]:
    """`kills` kills, up to three in one run, each resumed; how many runs ended in the undisturbed result."""
    job, chance = JOBS[name], random.Random(seed)
    started = time.monotonic()
    assert go_on(job, folder / "whole", processes) == [0] * processes
    lasts = moments = time.monotonic() - started
    expected = result(folder / "whole")
    found = dict.fromkeys(
        ("kills", "after_a_state_was_saved", "ended_before_the_kill", "survivors", "survivors_with_a_sentence",
         "survivors_stopped", "runs", "runs_with_the_undisturbed_result"), 0,
    )  # fmt: skip
    while found["kills"] < kills:
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        for _ in range(min(chance.randint(1, 3), kills - found["kills"])):
            victims = chance.choice([(0,)] if processes == 1 else [(0,), (1,), (0, 1)])
            codes = go_on(job, work, processes, chance.uniform(0.05, 1.0) * moments, victims)
            if not any(codes[victim] == -signal.SIGKILL for victim in victims):
                found["ended_before_the_kill"] += 1
                moments *= 0.8  # the machine was busier during the undisturbed run
                continue
            found["kills"] += 1
            found["after_a_state_was_saved"] += any(work.glob("**/state.*"))
            left = [code for rank, code in enumerate(codes) if rank not in victims and code != 0]
            found["survivors"] += len(left)
            found["survivors_with_a_sentence"] += left.count(2)
            found["survivors_stopped"] += left.count(None)
        found["runs"] += 1
        good = go_on(job, work, processes) == [0] * processes and same(result(work), expected)
        found["runs_with_the_undisturbed_result"] += good
    return {**found, "seconds_undisturbed": round(lasts, 2)}


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
    for name in sys.argv[2:] or JOBS:
        for processes in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                found = attack(name, Path(folder), int(sys.argv[1]), processes)
                print(name, processes, json.dumps(found), flush=True)
