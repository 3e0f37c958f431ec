"""A compiled run, also as CUDA graphs and in two processes, ends in the weights of an eager one."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from test_resume_and_parts import RECIPE, check_close, last, tune
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule

from diffrate.training import gradients
from diffrate.training import loop as training_loop
from diffrate.training.objective import Objective


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | None]]:
    """Those that models are compiled in, here by a backend that needs no compiler of the machine's; on the CPU."""
    found, compiles = [], torch.compile

    def compiled(model: nn.Module, mode: str | None) -> nn.Module:
        found.append(mode)
        return compiles(model, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", compiled)
    AcceleratorState._reset_state(True)
    yield found
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize(("graphs", "accumulate"), [(False, 1), (True, 1), (True, 2)])
def test_a_compiled_run_ends_in_the_same_weights(
    tmp_path: Path, modes: list[str | None], monkeypatch: pytest.MonkeyPatch, graphs: bool, accumulate: int
) -> None:
    on_cpu = Accelerator(cpu=True)
    tune(tmp_path / "eager", drop_path=0.0, accelerator=on_cpu)
    assert not gradients.can_be_graphs(on_cpu.device, False)
    monkeypatch.setattr(gradients, "can_be_graphs", lambda *_: graphs)
    recipe = replace(RECIPE, compile=True, accumulate=accumulate)
    tune(tmp_path / "compiled", recipe, drop_path=0.0, accelerator=on_cpu)
    assert modes == ["reduce-overhead" if graphs else None]
    check_close(last(tmp_path / "compiled"), last(tmp_path / "eager"))


def test_graphs_are_given_up_where_memory_runs_out(
    tmp_path: Path, modes: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu, seen = Accelerator(cpu=True), []
    tune(tmp_path / "eager", drop_path=0.0, accelerator=on_cpu)

    class Short(Objective):
        def __call__(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
            seen.append((len(images), isinstance(model, OptimizedModule)))
            if len(images) > 4:
                raise torch.OutOfMemoryError
            return super().__call__(model, images, labels)

    monkeypatch.setattr(training_loop, "Objective", Short)
    monkeypatch.setattr(gradients, "can_be_graphs", lambda *_: True)
    uncompiled = pytest.warns(RuntimeWarning, match="goes on uncompiled, without CUDA graphs")
    with uncompiled, pytest.warns(RuntimeWarning, match="goes on with 4 at a time"):
        tune(tmp_path / "short", replace(RECIPE, compile=True), drop_path=0.0, accelerator=on_cpu)
    assert seen[:3] == [(8, True), (4, False), (4, False)]
    assert set(seen[3:]) == {(4, False)}
    check_close(last(tmp_path / "short"), last(tmp_path / "eager"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_as_graphs_end_in_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    modes, compiles = [], torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, mode: modes.append(mode) or compiles(model, mode=mode)
    )
    AcceleratorState._reset_state(True)
    tune(tmp_path / "eager", drop_path=0.0)
    tune(tmp_path / "graphs", replace(RECIPE, compile=True, accumulate=accumulate), drop_path=0.0)
    assert modes == ["reduce-overhead"]
    check_close(last(tmp_path / "graphs"), last(tmp_path / "eager"))


TOGETHER = """
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from diffrate.training import gradients, loop
from diffrate.training.objective import Objective
from test_resume_and_parts import RECIPE, check_close, last, tune

folder, on_cpu = Path(sys.argv[1]), sys.argv[2] == "cpu"
gloo = InitProcessGroupKwargs(backend="gloo")
accelerator = Accelerator(cpu=on_cpu, kwargs_handlers=[gloo])
assert accelerator.num_processes == 2
compiled, compiles, counter = [], nn.Module.compile, CompileCounterWithBackend("aot_eager" if on_cpu else "inductor")

def compile(model, mode):
    compiled.append((mode, model))
    compiles(model, **({"backend": counter} if on_cpu else {"mode": mode}))

nn.Module.compile = compile
if on_cpu:
    gradients.can_be_graphs = lambda *_: True
recipe = replace(RECIPE, ema_decay=0.0)  # so that the model itself is evaluated
for accumulate in (1, 2):
    for compile in (False, True):
        name = folder / f"{accumulate} {compile}"
        tune(name, replace(recipe, accumulate=accumulate, compile=compile), 0.0, accelerator=accelerator)
    check_close(last(folder / f"{accumulate} True"), last(folder / f"{accumulate} False"))
assert [mode for mode, _ in compiled] == ["reduce-overhead"] * 2
assert all(model._compiled_call_impl is None for _, model in compiled)  # left as they came
if on_cpu:
    assert counter.frame_count == 2  # once each: rehearsals and evaluations were not

# One of the two has memory for half of its images: both go on with so many, uncompiled.
class Short(Objective):
    def __call__(self, model, images, labels):
        if len(images) > 2 and accelerator.process_index == 1:
            raise torch.OutOfMemoryError
        return super().__call__(model, images, labels)

loop.Objective = Short
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    tune(folder / "short", replace(recipe, compile=True), 0.0, accelerator=accelerator)
assert any("goes on uncompiled" in str(warning.message) for warning in said)
check_close(last(folder / "short"), last(folder / "1 False"))
assert compiled[-1][1]._compiled_call_impl is None
if on_cpu:
    assert counter.frame_count == 2
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
    ],
)
def test_two_compiled_processes_end_in_the_same_weights(tmp_path: Path, device: str) -> None:
    """The model inside DistributedDataParallel is compiled; on a GPU both processes share it."""
    (tmp_path / "together.py").write_text(TOGETHER)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    here = Path(__file__).parent
    known = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*map(str, (here, here.parent)), *sys.path]),
    }
    known |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    words = [sys.executable, str(tmp_path / "together.py"), str(tmp_path), device]
    runs = [
        subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | known | {"RANK": rank},
        )
        for rank in "01"
    ]
    try:
        said = [run.communicate(timeout=600)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], said[0][-3000:]
    assert all(text.endswith("done\n") for text in said)
