"""Two processes on a CPU (gloo) train as one does with the same global batch; one that dies leaves a usable state."""

import json
import os
import re
import signal
import socket
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
    check_trained_alike(tmp_path / "one", tmp_path / "two")


def check_trained_alike(one: Path, two: Path) -> None:
    """Losses, accuracies and last weights of two runs."""
    losses = [epoch["loss"] for epoch in history(one)]
    assert [epoch["loss"] for epoch in history(two)] == pytest.approx(losses, abs=1e-4)
    assert [epoch["accuracy"] for epoch in history(two)] == [epoch["accuracy"] for epoch in history(one)]
    assert max(losses) - min(losses) > 1e-2  # a curve, and not a line that anything would match
    a, b = (load_file(folder / "last.safetensors") for folder in (one, two))
    for name, value in a.items():
        if not name.endswith(
            "qkv.bias"
        ):  # that of keys has no gradient but rounding, which AdamW makes large
            torch.testing.assert_close(b[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_two_nodes_train_as_one_process(
    inputs: Path, tmp_path: Path, diffrate_cli: Callable[..., Ran]
) -> None:
    """Two launchers, as on two machines, of one process each, that meet at an address."""
    assert diffrate_cli(*command(inputs, tmp_path / "one", 6)).code == 0
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = command(inputs, tmp_path / "two", 6)
    torchrun = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-endpoint", f"localhost:{port}"]
    # Machines find each other by their names; this one need not have one that resolves.
    torchrun += ["--local-addr", "localhost"]
    logs = [tmp_path / f"node{rank}.txt" for rank in range(2)]
    nodes = []
    try:
        for rank, log in enumerate(logs):
            words = [sys.executable, "-m", *torchrun, "--node-rank", str(rank), "-m", "diffrate", *flags]
            with log.open("w") as text:
                nodes.append(
                    subprocess.Popen(words, stdout=text, stderr=subprocess.STDOUT, env=environment())
                )
        codes = [node.wait(timeout=300) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    said = [log.read_text() for log in logs]
    assert codes == [0, 0], said[0][-2000:] + said[1][-2000:]
    assert sorted(text.count("images/s") for text in said) == [0, 6]  # one of the two reports, once an epoch
    check_trained_alike(tmp_path / "one", tmp_path / "two")


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
    # Once, whether its collective fails first or torchrun asks it to stop.
    on = f"--resume goes on from {output / 'state.safetensors'}"
    noticed = rf"Error: another process of this training has ended \([^;]*\); {re.escape(on)}"
    asked = rf"Error: this training was asked to stop \(SIGTERM\)[^;]*; {re.escape(on)}"
    assert len(re.findall(f"{noticed}|{asked}", text)) == text.count(on) == 1, text
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


SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, sys.argv[1])
import diffrate
from conftest import random_vit
from diffrate.training.checkpoint import Progress, gather_state, load_state, save_state, whole_state

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
schedule = diffrate.Schedule([17, 15, 11, 6], [17, 12, 9, 4])

def built(sharded):
    model = random_vit(patch_size=8)
    if sharded:
        for block in model.blocks:
            fully_shard(block.mlp, mesh=mesh)
        fast = fully_shard(diffrate.compress(model, schedule), mesh=mesh)
    else:
        fast = diffrate.compress(model, schedule)
    return fast, torch.optim.AdamW(fast.parameters(), lr=1e-2, eps=1e-2, foreach=False)

def step(fast, optimizer, batch):
    fast(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

alone, parts = built(False), built(True)
for _ in range(2):
    step(*alone, images)
    step(*parts, images[2 * rank : 2 * rank + 2])
    with torch.inference_mode():  # as an evaluation between two epochs
        parts[0](images)
ours = whole_state(parts[0])
for name, value in alone[0].state_dict().items():
    torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4)
state, path = gather_state(parts[0], None, parts[1]), sys.argv[2]
if rank == 0:
    from pathlib import Path
    save_state(Path(path), state, Progress(step=2))
dist.barrier()
again = built(True)
step(*again, images[:2])  # so that it has a state of its own, to be replaced
assert load_state(path, again[0], None, again[1]).step == 2
for one in (parts, again):
    step(*one, images[2 * rank : 2 * rank + 2])
first, second = whole_state(parts[0]), whole_state(again[0])
assert all(torch.equal(first[name], second[name]) for name in first)
"""


FSDP = """
import sys
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from diffrate.training import loop
from test_resume_and_parts import RECIPE, check_close, last, tune

folder, sharded, build = Path(sys.argv[1]), [], loop.Gradients

def counted(prepared, *rest):
    sharded.append(sum(isinstance(parameter, DTensor) for parameter in prepared.parameters()))
    return build(prepared, *rest)

loop.Gradients = counted
# As the flags of `accelerate launch` in docs/cluster.md make it; by itself accelerate shards on GPUs alone.
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Mlp"]
)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
plain, recipe = accelerator.state.distributed_type, replace(RECIPE, ema_decay=0.0)
tune(folder / "plain", recipe, 0.0, accelerator=accelerator)
accelerator.free_memory()  # it looks for a model's parameters among all that it prepared
accelerator.state.fsdp_plugin = plugin
for state in (accelerator.state, PartialState()):
    state.distributed_type = DistributedType.FSDP
assert len(tune(folder / "sharded", recipe, 0.0, accelerator=accelerator, max_minutes=0).history) == 1
accelerator.free_memory()
tune(folder / "sharded", recipe, 0.0, accelerator=accelerator, resume=True)
assert plain == DistributedType.MULTI_CPU
assert sharded[0] == 0
assert sharded[1] == sharded[2] > 0
if accelerator.is_main_process:
    check_close(last(folder / "sharded"), last(folder / "plain"))
"""

# A process that leaves while the other one still receives may abort, and so may gloo's threads when Python ends, which
# is no part of what is tested.
LEAVE = """
import os
import time
from pathlib import Path

from torch import distributed

distributed.barrier()
here = Path(__file__).parent
(here / f"arrived_{distributed.get_rank()}").touch()
while len(list(here.glob("arrived_*"))) < 2:
    time.sleep(0.05)
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_training_through_accelerates_fsdp_ends_in_the_same_weights(tmp_path: Path) -> None:
    """Two processes, stopped after an epoch and resumed, beside two that share nothing."""
    check_two(tmp_path, FSDP, tmp_path)


@pytest.mark.slow
def test_sharded_weights_train_save_and_come_back(tmp_path: Path) -> None:
    check_two(tmp_path, SHARDED, Path(__file__).parents[1], tmp_path / "state.safetensors")


def check_two(folder: Path, text: str, *arguments: Path) -> None:
    """A script in two processes, which both end with "done"."""
    script = folder / "script.py"
    script.write_text(text + LEAVE)
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    here = Path(__file__).parent
    known = environment()
    known["PYTHONPATH"] = os.pathsep.join([known["PYTHONPATH"], str(here), str(here.parent)])
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, "--rdzv-endpoint", "localhost:0", str(script), *map(str, arguments)],
        capture_output=True, text=True, env=known, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("done") == 2
