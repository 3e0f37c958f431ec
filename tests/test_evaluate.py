"""Evaluation: every number against one worked out by hand or by another library."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from diffrate.errors import DiffRateError
from diffrate.evaluate import evaluate, evaluate_in_turn


class Table(nn.Module):
    """A model that gives the logits written in a table for the image number in the first pixel."""

    def __init__(self, logits: Tensor, seconds: tuple[float, ...] = ()) -> None:
        super().__init__()
        self.register_buffer("logits", logits)
        self.seconds = list(seconds)
        self.batches: list[list[int]] = []

    def forward(self, images: Tensor) -> Tensor:
        index = images[:, 0, 0, 0].long()
        self.batches.append(index.tolist())
        if self.seconds:
            time.sleep(self.seconds.pop(0))
        return self.logits[index]


def loader_of(labels: Tensor, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    numbers = torch.arange(len(labels)).float()
    return DataLoader(TensorDataset(numbers[:, None, None, None].expand(-1, 3, 2, 2), labels), batch_size)


@pytest.fixture
def made() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of two models for 50 images in 12 classes, and the labels."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(50, 12, generator=generator)
    other = logits + 0.8 * torch.randn(50, 12, generator=generator)
    labels = torch.randint(12, (50,), generator=generator)
    labels[:25] = logits[:25].argmax(1)  # so that there is something to lose, too
    return logits, other, labels


def test_accuracy_and_loss_against_numpy(made: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, _, labels = made
    result = evaluate(Table(logits), loader_of(labels, 7))
    table, truth = logits.numpy().astype(np.float64), labels.numpy()
    ranks = (table > table[np.arange(50), truth][:, None]).sum(1)
    log_likelihood = table[np.arange(50), truth] - np.log(np.exp(table).sum(1))
    assert result.images == 50
    assert result.top1 == pytest.approx(100 * (ranks == 0).mean())
    assert result.top5 == pytest.approx(100 * (ranks < 5).mean())
    assert result.loss == pytest.approx(-log_likelihood.mean(), abs=1e-6)
    assert result.reference is None
    assert result.comparison is None
    assert np.array_equal(result.predicted.numpy(), table.argmax(1))


def test_comparison_is_paired(made: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, other, labels = made
    result = evaluate(Table(other), loader_of(labels, 8), compare=Table(logits))
    alone = [evaluate(Table(each), loader_of(labels, 8)) for each in (other, logits)]
    assert result.reference is not None
    assert (result.top1, result.reference.top1) == (alone[0].top1, alone[1].top1)
    ours, theirs = other.argmax(1) == labels, logits.argmax(1) == labels
    nll = (torch.logsumexp(other, 1) - other[range(50), labels]) - (
        torch.logsumexp(logits, 1) - logits[range(50), labels]
    )
    comparison = result.comparison
    assert comparison is not None
    assert comparison.gained == sum(a and not b for a, b in zip(ours, theirs, strict=True)) > 0
    assert comparison.lost == sum(b and not a for a, b in zip(ours, theirs, strict=True)) > 0
    assert (
        comparison.changed
        == int((other.argmax(1) != logits.argmax(1)).sum())
        > comparison.gained + comparison.lost
    )
    assert comparison.top1_difference == pytest.approx(2 * (comparison.gained - comparison.lost))
    assert comparison.loss_difference == pytest.approx(nll.mean().item(), abs=1e-6)
    assert comparison.loss_standard_error == pytest.approx(
        np.std(nll.numpy(), ddof=1) / math.sqrt(50), rel=1e-5
    )


def test_a_model_compared_with_itself_does_not_differ(made: tuple[Tensor, Tensor, Tensor]) -> None:
    comparison = evaluate(Table(made[0]), loader_of(made[2], 8), compare=Table(made[0])).comparison
    assert comparison is not None
    assert (comparison.top1_difference, comparison.loss_difference, comparison.loss_standard_error) == (
        0,
        0,
        0,
    )
    assert (comparison.gained, comparison.lost, comparison.changed) == (0, 0, 0)


def test_both_models_see_the_same_batches_of_one_pass(made: tuple[Tensor, Tensor, Tensor]) -> None:
    class Once:
        """A loader that can be read only once, in an order of its own."""

        def __init__(self) -> None:
            self.batches = list(loader_of(made[2], 20))[::-1]

        def __iter__(self) -> Iterator[list[Tensor]]:
            while self.batches:
                yield self.batches.pop()

    first, second = Table(made[0]), Table(made[1])
    assert evaluate(first, Once(), compare=second).images == 50
    assert first.batches == second.batches
    assert [len(batch) for batch in first.batches] == [20, 20, 10]


def test_taking_turns_gives_what_an_evaluation_gives(made: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, other, labels = made
    models = {"one": Table(logits), "two": Table(other)}
    seen: list[tuple[str, int]] = []
    in_turn = evaluate_in_turn(
        models,
        loader_of(labels, 20),
        after=lambda name, images: seen.append((name, len(images))),
        warm_up=False,
    )
    for name, table in (("one", logits), ("two", other)):
        alone = evaluate(Table(table), loader_of(labels, 20))
        assert torch.equal(in_turn[name].predicted, alone.predicted)
        assert torch.equal(in_turn[name].nll, alone.nll)
        assert (in_turn[name].top1, in_turn[name].top5) == (alone.top1, alone.top5)
        assert [len(batch) for batch in models[name].batches] == [20, 20, 10]
    assert seen == [("one", 20), ("two", 20), ("two", 20), ("one", 20), ("one", 10), ("two", 10)]


class Wrapped(Table):
    """A model that answers as transformers' models do."""

    def forward(self, images: Tensor) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(logits=super().forward(images))


def test_outputs_of_other_libraries_are_evaluated_in_turn(made: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, _, labels = made
    models = {"plain": Table(logits), "wrapped": Wrapped(logits)}
    in_turn = evaluate_in_turn(models, loader_of(labels, 8))
    assert in_turn["wrapped"].top1 == in_turn["plain"].top1
    assert in_turn["wrapped"].labels.tolist() == labels.tolist()


def test_speed_in_turn_is_that_of_the_batch_in_the_middle() -> None:
    logits, labels = torch.eye(6), torch.arange(6)
    models = {"slow": Table(logits, seconds=(0.9, 0.05, 0.3, 0.05)), "other": Table(logits)}
    result = evaluate_in_turn(models, loader_of(labels, 2))["slow"]  # the first 0.9 s warm it up
    assert 2 / 0.2 < result.images_per_second < 2 / 0.05


def test_fewer_than_five_classes(made: tuple[Tensor, Tensor, Tensor]) -> None:
    result = evaluate(Table(made[0][:, :3]), loader_of(made[2] % 3, 50))
    assert result.top5 == 100
    assert 0 < result.top1 < 100


def test_speed_leaves_out_the_first_batch_when_there_are_others() -> None:
    logits, labels = torch.eye(4), torch.arange(4)
    several = evaluate(Table(logits, seconds=(0.5, 0.05, 0.05)), loader_of(labels, 2))
    assert 2 / 0.2 < several.images_per_second < 2 / 0.05
    single = evaluate(Table(logits, seconds=(0.1,)), loader_of(labels, 4))
    assert 4 / 0.4 < single.images_per_second < 4 / 0.1


def test_amp_runs_the_model_in_that_type() -> None:
    seen = []

    class Probe(nn.Linear):
        def forward(self, images: Tensor) -> Tensor:
            logits = super().forward(images[:, :, 0, 0])
            seen.append(logits.dtype)
            return logits

    for amp, expected in ((False, torch.float32), (True, torch.bfloat16)):
        evaluate(Probe(3, 4), loader_of(torch.arange(4), 4), amp=amp, amp_dtype="bfloat16")
        assert seen.pop() == expected
    with pytest.raises(DiffRateError, match="amp dtype must be one of float16, bfloat16, not 'int8'"):
        evaluate(Probe(3, 4), loader_of(torch.arange(4), 4), amp=True, amp_dtype="int8")


def test_the_models_mode_comes_back() -> None:
    model = Table(torch.eye(4)).train()
    evaluate(model, loader_of(torch.arange(4), 4))
    assert model.training


def test_what_cannot_be_evaluated_is_refused() -> None:
    labels = torch.arange(4)
    with pytest.raises(DiffRateError, match="not finite"):
        evaluate(Table(torch.full((4, 4), torch.nan)), loader_of(labels, 4))
    with pytest.raises(DiffRateError, match="labels go from 0 to 3, but the model has 3 classes"):
        evaluate(Table(torch.ones(4, 3)), loader_of(labels, 4))
    with pytest.raises(DiffRateError, match="labels go from -1"):
        evaluate(Table(torch.ones(4, 3)), loader_of(labels * 0 - 1, 4))
    with pytest.raises(DiffRateError, match="no images"):
        evaluate(Table(torch.ones(4, 3)), [])
