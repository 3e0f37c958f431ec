"""A device without memory for a batch: a model that has none above so many images gives what it gives with enough."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn

import diffrate
from attack.kill import start
from conftest import random_vit
from diffrate.bench import bench_search
from diffrate.compare import compare
from diffrate.errors import DiffRateError
from diffrate.evaluate import evaluate
from diffrate.portions import Portions, largest_that_fits, out_of_memory
from diffrate.speed import bench
from diffrate.training import FINETUNE, finetune

SCHEDULE = diffrate.Schedule((65, 50, 40, 30), (65, 45, 35, 20))
NO_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1.00 GiB."


def short_of_memory(model: nn.Module, most: int, seen: list[int] | None = None) -> nn.Module:
    """The same model on a device that has memory for so many images at once."""

    def check(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(inputs[0]) > most:
            raise torch.OutOfMemoryError(NO_MEMORY)
        if seen is not None:
            seen.append(len(inputs[0]))

    model.patch_embed.register_forward_pre_hook(check)
    return model


def full_above(most: int) -> Callable[[int], int]:
    """What gives the size it is given, on a GPU that has no memory for more than `most`."""

    def run(size: int) -> int:
        if size > most:
            raise torch.AcceleratorError("CUDA error: out of memory", 2)
        return size

    return run


@contextmanager
def notes(expected: str) -> Iterator[None]:
    """What is said about memory inside, of which some must match."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(each.message) for each in caught]
    assert any(re.search(expected, line) for line in said), said
    assert all("more memory than there is" in line for line in said), said


def images(count: int) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(3, 32, 32, generator=generator), i % 7) for i in range(count)]


def batches(count: int, size: int) -> list[tuple[Tensor, Tensor]]:
    every, labels = zip(*images(count), strict=True)
    return list(zip(torch.stack(every).split(size), torch.tensor(labels).split(size), strict=True))


def test_portions_halve_until_they_fit_and_stay_there() -> None:
    tried: list[list[int]] = []

    def run(parts: list[slice]) -> int:
        tried.append([part.stop - part.start for part in parts])
        if max(tried[-1]) > 4:
            raise torch.OutOfMemoryError(NO_MEMORY)
        return sum(tried[-1])

    portions = Portions("the test")
    with pytest.warns(RuntimeWarning, match="more memory than there is: the test goes on with") as said:
        assert portions.fitted(run, 13) == 13
    assert [str(each.message).split()[0] for each in said] == ["13", "7"]
    assert tried == [[13], [7, 6], [4, 4, 4, 1]]
    assert portions.fitted(run, 6) == 6
    assert tried[3:] == [[4, 2]]


def test_what_no_portion_helps_is_raised() -> None:
    def never(parts: list[slice]) -> None:
        raise torch.OutOfMemoryError(NO_MEMORY)

    def other(parts: list[slice]) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(torch.OutOfMemoryError):
        Portions("", splits=False).fitted(never, 8)
    with pytest.warns(RuntimeWarning), pytest.raises(torch.OutOfMemoryError):
        Portions("").fitted(never, 2)
    with pytest.raises(RuntimeError, match="shapes"):
        Portions("").fitted(other, 8)
    with pytest.warns(RuntimeWarning), pytest.raises(DiffRateError, match="even for one image"):
        largest_that_fits(lambda size: never([]), 4, "the test")
    with notes("a batch of 8 takes more memory than there is: the test is of 4 images"):
        assert largest_that_fits(full_above(4), 8, "the test") == 4


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(NO_MEMORY), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (torch.AcceleratorError("CUDA error: out of memory\nCompile with …", 2), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, expected: bool) -> None:
    assert out_of_memory(error) is expected


def test_an_evaluation_goes_on_in_smaller_batches() -> None:
    seen: list[int] = []
    whole = evaluate(random_vit(), batches(20, 8), progress=False)
    with notes("8 images at once .* the evaluation goes on with 4"):
        lean = evaluate(short_of_memory(random_vit(), 5, seen), batches(20, 8), progress=False)
    assert seen == [4] * 5
    torch.testing.assert_close(lean.nll, whole.nll)
    assert torch.equal(lean.predicted, whole.predicted)
    assert lean.images == 20


def test_a_comparison_goes_on_in_smaller_batches() -> None:
    def rows(model: nn.Module) -> list[dict[str, object]]:
        found = compare(model, batches(12, 6), ["tome", "ats"], "60%", speed=False, progress=False)
        return [{k: v for k, v in row.to_dict().items() if k != "note"} for row in found.rows]

    expected = rows(random_vit())
    with notes("the evaluation goes on with 3"):
        found = rows(short_of_memory(random_vit(), 12 // 3))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["top1"] == theirs["top1"]
        assert ours["gmacs"] == pytest.approx(theirs["gmacs"], rel=1e-6)


@pytest.mark.parametrize("recipe", ["fast", "paper"])
def test_a_search_finds_the_same_in_portions(recipe: str) -> None:
    def found(model: nn.Module) -> list[dict[str, object]]:
        result = diffrate.search(
            model, images(24), "60%", recipe=recipe, steps=4, batch_size=6, progress=False
        )
        return [{"kept": step["kept"], "loss": step["loss"]} for step in result.history]

    expected = found(random_vit())
    with notes("6 images at once .* the search goes on with 3 at a time"):
        lean = found(short_of_memory(random_vit(), 4))
    assert [step["kept"] for step in lean] == [step["kept"] for step in expected]
    assert [step["loss"] for step in lean] == pytest.approx([step["loss"] for step in expected], rel=2e-3)


def tuned(
    model: nn.Module, folder: Path, accelerator: Accelerator | None = None, **changes: object
) -> dict[str, Tensor]:
    """By an optimiser that does not forgive gradients of another length."""
    settings = {"epochs": 2, "batch_size": 8, "precision": "no", "lr": 1e-3, "opt": "sgd"}
    recipe = replace(FINETUNE, **(settings | changes))
    finetune(model, SCHEDULE, images(24), images(8), folder, recipe, progress=False, accelerator=accelerator)
    return load_file(folder / "last.safetensors")


def check_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, value in theirs.items():
        if not name.endswith(
            "qkv.bias"
        ):  # that of keys has no gradient but rounding, which AdamW makes large
            torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_keeps_its_batch(tmp_path: Path, accumulate: int) -> None:
    seen: list[int] = []
    expected = tuned(random_vit(), tmp_path / "whole", accumulate=accumulate)
    before = random_vit().state_dict()
    assert max(float((expected[name] - value).abs().max()) for name, value in before.items()) > 1e-3
    with notes("the training goes on with"):
        lean = tuned(short_of_memory(random_vit(), 3, seen), tmp_path / "lean", accumulate=accumulate)
    assert max(seen) == 2
    check_equal(lean, expected)


@pytest.mark.slow
def test_memory_that_runs_out_in_a_backward_pass_leaves_no_gradient_behind(tmp_path: Path) -> None:
    class Costly(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            if len(grad) > 5:
                raise torch.OutOfMemoryError(NO_MEMORY)
            return grad

    expected = tuned(random_vit(), tmp_path / "whole")
    model = random_vit()
    # The blocks behind this one have their gradients by then.
    model.blocks[1].mlp.register_forward_hook(lambda _, __, x: Costly.apply(x))
    with notes("the training goes on with 4"):
        check_equal(tuned(model, tmp_path / "lean"), expected)


@pytest.mark.slow
def test_benchmarks_halve_the_batch_and_say_of_how_many_images_they_are() -> None:
    model = short_of_memory(random_vit(), 3)
    with notes("a batch of 8 .* is of 4 images"):
        (rows,) = bench(model, {"mine": SCHEDULE}, [8], repeats=2)
    assert {row.batch_size for row in rows} == {2}
    with notes("a batch of 8"):
        steps = bench_search(model, 8, repeats=2)
    assert {step.batch_size for step in steps} == {2}


def test_the_command_line_says_so(diffrate_cli: Callable, eval_flags: list, monkeypatch) -> None:
    built = diffrate.models.load_model
    monkeypatch.setattr(
        "diffrate.cli.evaluation.load_model", lambda *a, **k: short_of_memory(built(*a, **k), 4)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        ran = diffrate_cli(*eval_flags)
    assert ran.code == 0, ran.err
    assert "Note: 5 images at once take more memory than there is: the evaluation goes on with 3" in ran.err


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(NO_MEMORY),
        torch.AcceleratorError("CUDA error: out of memory", 2),  # of a GPU that others have filled
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."),
        MemoryError(),
    ],
    ids=["torch", "CUDA", "CPU", "Python"],
)
def test_no_memory_for_the_model_itself_is_one_sentence(
    diffrate_cli: Callable, eval_flags: list, monkeypatch, error: Exception
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("diffrate.cli.evaluation.load_model", full)
    ran = diffrate_cli(*eval_flags)
    assert ran.code == 2
    assert "Error: this takes more memory than there is: try a smaller batch size" in " ".join(
        ran.err.split()
    )


@pytest.mark.slow
def test_two_processes_agree_on_the_portion_of_the_one_with_less_memory(tmp_path: Path) -> None:
    """One has memory for 3 images, the other for all 4 of its share; neither could go back alone in a backward pass."""

    def job() -> None:
        warnings.simplefilter("ignore")
        seen: list[int] = []
        most = 3 if os.environ["RANK"] == "1" else 100
        tuned(short_of_memory(random_vit(), most, seen), tmp_path / "two", accelerator=Accelerator(cpu=True))
        (tmp_path / f"{os.environ['RANK']}.json").write_text(json.dumps(seen))

    assert [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in start(job, 2)] == [0, 0]
    check_equal(load_file(tmp_path / "two" / "last.safetensors"), tuned(random_vit(), tmp_path / "one"))
    ample, short = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert ample[:7] == [4] + 6 * [2]  # it tried, and then went along, three steps an epoch
    assert max(short) == 2
