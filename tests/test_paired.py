"""Intervals and p-values against closed forms and hand computations."""

from __future__ import annotations

import math

import pytest
import torch

from diffrate.evaluate import Evaluation, compare_evaluations
from diffrate.paired import bootstrap_intervals, mcnemar


def test_mcnemar_by_hand() -> None:
    assert mcnemar(1, 9) == pytest.approx(2 * (1 + 10) / 2**10)
    assert mcnemar(9, 1) == mcnemar(1, 9)
    assert mcnemar(0, 5) == pytest.approx(2 / 2**5)
    assert mcnemar(0, 0) == mcnemar(4, 4) == mcnemar(0, 1) == 1.0
    assert 0 < mcnemar(3000, 3300) < 1e-3  # no overflow; a normal approximation gives 1.6e-4
    assert mcnemar(3000, 3300) == pytest.approx(math.erfc((300 - 1) / math.sqrt(2 * 6300)), rel=0.02)


def test_interval_is_that_of_a_normal_mean_where_there_are_many_images() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(4000, generator=generator, dtype=torch.float64)
    narrow, shifted = bootstrap_intervals(torch.stack([values, 3 + 2 * values]))
    half = 1.96 * values.std().item() / math.sqrt(4000)
    mean = values.mean().item()
    assert narrow == pytest.approx((mean - half, mean + half), abs=0.05 * half + 1e-3)
    assert shifted == pytest.approx([3 + 2 * end for end in narrow])  # the same draws
    assert bootstrap_intervals(values[None]) == bootstrap_intervals(values[None])
    assert bootstrap_intervals(torch.full((1, 10), 0.5)) == [(0.5, 0.5)]


def test_chunks_do_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(30.0)[None]
    whole = bootstrap_intervals(values, resamples=50)
    monkeypatch.setattr("diffrate.paired.AT_ONCE", 30 * 7)
    assert bootstrap_intervals(values, resamples=50) == whole


def test_a_comparison_has_both() -> None:
    def evaluation(correct: list[bool]) -> Evaluation:
        right = torch.tensor(correct)
        wrong = (~right).long()
        return Evaluation(0, 0, 0, len(right), 1, wrong, right, wrong.float(), torch.zeros_like(wrong))

    a = evaluation([True] * 60 + [False] * 40)
    b = evaluation([True] * 51 + [False] * 48 + [True])  # 9 lost, 1 gained
    comparison = compare_evaluations(b, a)
    assert (comparison.gained, comparison.lost) == (1, 9)
    assert comparison.mcnemar_p == pytest.approx(22 / 1024)
    low, high = comparison.top1_interval
    assert -16 < low < -8 < high < 0
    assert comparison.loss_interval == pytest.approx((-high / 100, -low / 100), abs=0.011)
