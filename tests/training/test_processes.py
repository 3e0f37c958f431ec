"""Two processes on a CPU (gloo) train as one does with the same global batch; one that dies leaves a usable state."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import diffrate
from conftest import TINY, TINY_FLAGS, Ran, random_vit, write_image
from diffrate import Schedule

# Without drop path, which each process draws for itself; mixing and augmentation are in.
FLAGS = [
    *TINY_FLAGS, "--drop-path", 0, "--batch-size", 8, "--lr", 1e-3, "--precision", "no", "--device", "cpu",
    "--workers", 0, "--layer-decay", 0.8, "--ema-decay", 0.9, "--distillation", 0.5, "--clip-grad", 1,
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen images to train on and six to choose by, a checkpoint and a schedule."""
    folder = tmp_path_factory.mktemp("inputs")
    for i in range(22):
        split = "train" if i < 16 else "val"
        write_image(folder / split / f"{i % 3:03d}" / f"{i:02d}.png", seed=i)
    model = random_vit(**TINY)
    save_file(model.state_dict(), folder / "weights.safetensors")
    Schedule([17, 14, 10, 6], [17, 12, 8, 4]).save(folder / "schedule.json")
    return folder


def command(inputs: Path, output: Path, epochs: int, *more: object) -> list[str]:
    flags = ["finetune", "--schedule", inputs / "schedule.json", "--output", output, "--data-dir", inputs]
    flags += ["--checkpoint", inputs / "weights.safetensors", "--epochs", epochs, *FLAGS, *more]
    return [str(flag) for flag in flags]


def over_two(flags: list[str]) -> list[str]:
    """The same command in two processes, on a port that is free."""
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    return [sys.executable, "-m", *torchrun, "--rdzv-endpoint", "localhost:0", "-m", "diffrate", *flags]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(diffrate.__file__).parents[1])}


def history(output: Path) -> list[dict[str, float]]:
    return json.loads((output / "metrics.json").read_text())["results"]["history"]


@pytest.mark.slow
def test_two_processes_train_as_one(inputs: Path, tmp_path: Path, diffrate_cli: Callable[..., Ran]) -> None:
    assert diffrate_cli(*command(inputs, tmp_path / "one", 6)).code == 0
    words = over_two(command(inputs, tmp_path / "two", 6))
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = history(tmp_path / "one"), history(tmp_path / "two")
    losses = [epoch["loss"] for epoch in one]
    assert [epoch["loss"] for epoch in two] == pytest.approx(losses, abs=1e-4)
    assert [epoch["accuracy"] for epoch in two] == [epoch["accuracy"] for epoch in one]
    assert max(losses) - min(losses) > 1e-2  # a curve, and not a line that anything would match
    a, b = (load_file(tmp_path / name / "last.safetensors") for name in ("one", "two"))
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_killed_worker_ends_the_job_and_leaves_a_state_to_resume(
    inputs: Path, tmp_path: Path, diffrate_cli: Callable[..., Ran]
) -> None:
    output = tmp_path / "run"
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(
            over_two(command(inputs, output, 5000)), stdout=log, stderr=subprocess.STDOUT, env=environment()
        )
        try:
            wait_until(lambda: (output / "state.safetensors").is_file() or job.poll() is not None, 300)
            os.kill(worker(job.pid, rank=1), signal.SIGKILL)
            assert job.wait(timeout=200) != 0
        finally:
            job.kill()
    text = " ".join((tmp_path / "log").read_text().split())
    assert "Error: another process of this training has ended at step" in text
    assert f"--resume goes on from {output / 'state.safetensors'}" in text
    # What it left is whole: the run goes on from there, here until the time that it is given is over.
    assert diffrate_cli(*command(inputs, output, 5000, "--resume", "--max-minutes", 0)).code == 0
    assert len(history(output)) >= 1
    assert set(load_file(output / "weights.safetensors")) == set(load_file(inputs / "weights.safetensors"))


def worker(launcher: int, rank: int) -> int:
    """The process of that rank among the children of torchrun."""
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"\0RANK={rank}\0" in "\0" + Path(f"/proc/{pid}/environ").read_text():
            return int(pid)
    raise AssertionError(f"no worker of rank {rank}")


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.2)
