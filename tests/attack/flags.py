"""Every flag of every command, with wrong types and extremes; the commands come from the command line itself.

Each attack runs in an empty folder, in a process that is forked off this one, which has imported all that commands
need: a refusal takes a quarter of a second. It must end well or with exit code 2, a sentence and nothing written.
"""

from __future__ import annotations

import gc
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import torch
import typer
from PIL import Image
from safetensors.torch import save_file

import diffrate
from attack.outcome import ACCEPTED, REFUSED, Tally
from conftest import TINY_FLAGS, write_image
from diffrate.cli.app import app, main
from diffrate.dense.camvid import CLASSES
from diffrate.dense.segmenter import build_segmenter
from diffrate.training.checkpoint import save_weights
from report.runs import SCRIPT, plain_run, tiny_model

SECONDS, LONG_SECONDS, MEMORY = 60, 8, 12 << 30
NUMBERS = ("", "x", "-1", "0", "0.5", "nan", "inf", "1e308", "-1e308", "1000000000", "9" * 30, "1,2,3")
TEXTS = (
    SCRIPT, "x" * 5000, "a,b", "pipe", "folder", "no/such/file.json", "a=b", "\n", "%s%n", "published:nan", "1e9G",
    "0%", "nanms", "../x\x01", "\udcff",
)  # fmt: skip
# What asks for no more than a long run, which may still be under way when time is up.
LONG = {"--epochs", "--steps", "--repeats", "--images", "--rounds", "--hardware-steps", "--max-minutes", "--explore",
        "--warmup-epochs", "--cooldown-epochs", "--patience", "--compile", "demo"}  # fmt: skip


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command, by its words."""

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        inner = getattr(command, "commands", None)
        if not inner:
            yield words, command
            return
        for name, each in inner.items():
            yield from walk(each, (*words, name))

    return walk(typer.main.get_command(app), ())


class Inputs:
    """Good inputs for every command, small enough that a whole run takes about a second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for i in range(18):
            for split in ("train", "val"):
                write_image(folder / "images" / split / f"{i % 3:03d}" / f"{i}.png", i)
        torch.manual_seed(0)
        model = tiny_model()
        save_file(model.state_dict(), folder / "weights.safetensors")
        diffrate.Schedule((17, 14, 10, 3), (17, 12, 8, 3)).save(folder / "schedule.json")
        plain_run(folder / "run")
        for split in ("train", "val", "test"):
            for i in range(16 if split == "train" else 2):
                write_image(folder / "scenes" / split / f"{i}.png", i, (64, 96))
                labels = folder / "scenes" / f"{split}annot" / f"{i}.png"
                labels.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.full((64, 96), i, np.uint8)).save(labels)
        segmenter = build_segmenter("vit_tiny_patch16_224", len(CLASSES), (64, 96), width=16)
        save_weights(segmenter, folder / "segmenter" / "weights.safetensors")
        settings = {
            "model": "vit_tiny_patch16_224",
            "width": 16,
            "img_size": [64, 96],
            "classes": list(CLASSES),
        }
        (folder / "segmenter" / "segmenter.json").write_text(json.dumps({"results": settings}))

    def arguments(self, words: tuple[str, ...]) -> list[str]:
        """A command line that works, or is refused for a reason of its own."""
        at = self.folder
        schedule = ["--schedule", f"{at}/schedule.json"]
        data = ["--data-dir", f"{at}/images", "--workers", "0"]
        weights = ["--checkpoint", f"{at}/weights.safetensors"]
        cpu = ["--device", "cpu"]
        few = ["--epochs", "1", "--batch-size", "4", "--precision", "no"]
        return {
            "models": [],
            "schedules": [],
            "methods": [],
            "macs": [*TINY_FLAGS, *schedule],
            "compress": [*TINY_FLAGS, *schedule, "--output", "new.json"],
            "search": [*TINY_FLAGS, *data, *weights, *cpu, "--budget", "60%", "--output", "new", "--steps", "1"],
            "cosearch": [*TINY_FLAGS, *data, *cpu, "--budget", "60%,1ms", "--output", "new", "--steps", "1",
                         "--rounds", "1", "--hardware-steps", "2"],
            "profile": [*TINY_FLAGS, *cpu, "--batch-size", "1", "--repeats", "3", "--output", "new.json"],
            "eval": [*TINY_FLAGS, *data, *weights, *cpu, *schedule],
            "compare": [*TINY_FLAGS, *data, *weights, *cpu, "--methods", "tome", "--budget", "60%"],
            "bench": [*TINY_FLAGS, *schedule, *cpu, "--batch-size", "1", "--repeats", "4"],
            "finetune": [*TINY_FLAGS, *data, *weights, *schedule, *cpu, *few, "--output", "new"],
            "train": [*TINY_FLAGS, *data, *cpu, *few, "--output", "new"],
            "export": [*TINY_FLAGS, *weights, *schedule, "--to", "safetensors", "--output", "new"],
            "visualize": [f"{at}/images/val/000/0.png", *TINY_FLAGS, *weights, *schedule, *cpu, "--output", "new"],
            "report": [f"{at}/run", "--output", "new.html"],
            "demo": ["--output", "new", "--images", "2"],
            "segment train": ["--model", "vit_tiny_patch16_224", "--data-dir", f"{at}/scenes", "--output", "new",
                              "--epochs", "1", *cpu],
            "segment search": ["--from", f"{at}/segmenter", "--data-dir", f"{at}/scenes", "--budget", "60%",
                               "--output", "new", "--steps", "1", *cpu],
            "segment eval": ["--from", f"{at}/segmenter", "--data-dir", f"{at}/scenes", *cpu],
        }[" ".join(words)]  # fmt: skip


def every_attack(inputs: Inputs, values: int, chance: random.Random) -> Iterator[tuple[str, list[str]]]:
    """For every flag of every command some of the values, in place of the good one."""
    for words, command in commands():
        good = inputs.arguments(words)
        for parameter in command.params:
            flag = parameter.opts[0]
            if not flag.startswith("-"):
                for value in drawn(values, chance):
                    yield flag, [*words, value, *good[1:]]
            elif getattr(parameter, "is_flag", False):
                yield flag, [*words, *good, flag]
            else:
                number = parameter.nargs if parameter.nargs > 1 else 1
                for value in drawn(values, chance):
                    yield flag, [*words, *without(good, flag), flag, *[value] * number]


def drawn(values: int, chance: random.Random) -> list[str]:
    """Numbers and texts in equal shares."""
    return chance.sample(NUMBERS, (values + 1) // 2) + chance.sample(TEXTS, values // 2)


def without(arguments: list[str], flag: str) -> list[str]:
    if flag == "--model-kwargs" or flag not in arguments:
        return arguments
    place = arguments.index(flag)
    return arguments[:place] + arguments[place + 2 :]


def ready(folder: Path) -> Inputs:
    """The inputs, in a process that has imported what every process after a fork would import again."""
    inputs = Inputs(folder)
    warm_up(inputs)
    return inputs


def warm_up(inputs: Inputs) -> None:
    """Let every command refuse something: the rest of rich, timm and the commands is then imported."""
    given, interrupted, unraisable = sys.argv, signal.getsignal(signal.SIGINT), sys.unraisablehook
    for words, _ in commands():
        sys.argv = ["diffrate", *words, *inputs.arguments(words), "--no-such-flag"]
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), suppress(SystemExit):
            main()
    sys.argv, sys.unraisablehook = given, unraisable
    signal.signal(signal.SIGINT, interrupted)


def run_alone(
    folder: Path, arguments: list[str], seconds: float = SECONDS, before: Callable[[], object] = lambda: None
) -> tuple[int | None, str, list[str]]:
    """Exit code (None where time ran out), what was said, and what lies in the folder afterwards.

    before  is called in the folder, by the process that will run the command.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    said = folder.with_suffix(".txt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of newer Pythons, about forks
        gc.freeze()  # what other tests have left is not for the child to collect
        child = os.fork()
    if child == 0:
        _as_a_program(folder, said, arguments, before)
    gc.unfreeze()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code: int | None = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.01)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        code = None
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return code, said.read_text(errors="replace"), [name for name in left if name not in ("folder", "pipe")]


def _as_a_program(folder: Path, said: Path, arguments: list[str], before: Callable[[], object]) -> None:
    """The rest of a forked process: the command line, with limits, and its exit code."""
    code = 99
    try:
        os.setsid()
        with said.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(folder)
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY,) * 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", errors="backslashreplace")
        sys.argv = ["diffrate", *arguments]
        warnings.resetwarnings()
        before()
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 98
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def patience(flag: str, arguments: list[str]) -> float:
    return LONG_SECONDS if flag in LONG or arguments[0] in LONG else SECONDS


def judged(flag: str, arguments: list[str], code: int | None, said: str, left: list[str]) -> str:
    if code is None:
        return ACCEPTED if patience(flag, arguments) < SECONDS else "hang"
    if "Traceback" in said:
        return "traceback"
    if any(Path(name).name.startswith(".") for name in left):
        return "left behind"
    if code == 0:
        return ACCEPTED
    if code != 2:
        return f"exit code {code}"
    if left:
        return "partial output"
    return REFUSED if "Error" in said else "no sentence"


def attack(inputs: Inputs, folder: Path, values: int, seed: int = 0, every: int = 1) -> Tally:
    """`values` of the values for every flag; of all these attacks every so many."""
    tally = Tally()
    attacks = list(every_attack(inputs, values, random.Random(seed)))
    for flag, arguments in attacks[seed % every :: every]:
        code, said, left = run_alone(folder / "work", arguments, patience(flag, arguments))
        shown = json.dumps([argument[:60] for argument in arguments])
        tally.add(judged(flag, arguments, code, said, left), f"{flag}: {shown} {left} {said[-600:]}")
    return tally
