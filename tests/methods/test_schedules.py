"""Schedules without a search: on the budget, in the shape of their method, and within what a model allows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import timm
import torch
from torch import nn

import diffrate
from diffrate import embedded
from diffrate.backbones import backbone_of
from diffrate.errors import DiffRateError
from diffrate.methods.schedules import (
    constant_number,
    constant_rate,
    published_schedule,
    random_schedule,
    random_schedules,
    stepwise,
)
from diffrate.operator import Operator
from diffrate.schedule import Schedule

MODELS: dict[str, Callable[[], nn.Module]] = {
    "embedded": lambda: embedded.model(pretrained=False),
    "class token": lambda: timm.create_model("deit_tiny_patch16_224"),
    "two prefix tokens": lambda: timm.create_model("deit_tiny_distilled_patch16_224"),
    "mean of tokens": lambda: timm.create_model("vit_tiny_patch16_224", global_pool="avg"),
    "registers": lambda: timm.create_model("vit_tiny_patch16_224", reg_tokens=4, depth=7),
    "50 tokens": lambda: timm.create_model("vit_tiny_patch16_224", patch_size=32),
}
METHODS = {
    "constant rate": constant_rate,
    "constant number": constant_number,
    "stepwise": stepwise,
    "random": random_schedule,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return MODELS[request.param]().eval()


@pytest.mark.parametrize("share", [0.5, 0.65, 0.9])
@pytest.mark.parametrize("method", METHODS)
def test_meets_the_budget_from_below(model: nn.Module, method: str, share: float) -> None:
    budget = share * diffrate.gmacs(model)
    schedule = METHODS[method](model, budget)
    assert 0.99 * budget < diffrate.gmacs(model, schedule) <= budget
    assert schedule.cost["gmacs"] == diffrate.gmacs(model, schedule)
    layout = backbone_of(model).layout
    assert schedule.is_monotone
    assert schedule.merge[0] == layout.tokens
    assert schedule.merge[-1] > layout.prefix
    assert layout.compresses_last_block or schedule.merge[-1] == schedule.merge[-2]
    assert layout.compresses_last_block or schedule.prune[-1] == schedule.merge[-1]


def test_constant_number_takes_equally_many_in_every_block() -> None:
    model = embedded.model(pretrained=False)
    schedule = constant_number(model, 0.6 * diffrate.gmacs(model), Operator(operation="merge"))
    removed = [a - b for a, b in zip(schedule.merge, schedule.merge[1:], strict=False)]
    assert len(removed) == 11
    assert max(removed) - min(removed) <= 1
    assert schedule.operator.operation == "merge"


def test_constant_rate_takes_one_share_in_every_block() -> None:
    model = embedded.model(pretrained=False)
    kept = [n - 1 for n in constant_rate(model, 0.6 * diffrate.gmacs(model)).merge]
    share = (kept[-1] / 196) ** (1 / 11)
    assert 0.5 < share < 0.95
    assert kept == pytest.approx([196 * share**i for i in range(12)], abs=1.5)


@pytest.mark.parametrize("make", [constant_number, constant_rate, stepwise])
def test_half_of_what_goes_is_merged_where_an_operator_prunes_and_merges(make) -> None:
    model = embedded.model(pretrained=False)
    budget = 0.6 * diffrate.gmacs(model)
    both, merged = (make(model, budget, Operator(operation=each)) for each in ("prune-merge", "merge"))
    assert both.merge == merged.merge == merged.prune
    before = (197, *both.merge)
    for pruned, kept, had in zip(both.prune, both.merge, before, strict=False):
        assert abs((pruned - kept) - (had - pruned)) <= 1


def test_stepwise_keeps_one_share_at_blocks_4_7_and_10() -> None:
    model = embedded.model(pretrained=False)
    kept = [n - 1 for n in stepwise(model, 0.6 * diffrate.gmacs(model)).merge]
    assert len(set(kept[:3])) == len(set(kept[3:6])) == len(set(kept[6:9])) == len(set(kept[9:])) == 1
    share = kept[3] / 196
    assert kept[6] == pytest.approx(196 * share**2, abs=1.5)
    assert kept[9] == pytest.approx(196 * share**3, abs=1.5)


def test_a_published_schedule_near_the_budget_is_taken_as_it_is() -> None:
    model = timm.create_model("deit_tiny_patch16_224")
    paper = diffrate.Schedule.published("deit_tiny_patch16_224", 0.8)
    found = published_schedule(model, 1.005 * diffrate.gmacs(model, paper))
    assert (found.prune, found.merge) == (paper.prune, paper.merge)
    assert found.cost["gmacs"] == diffrate.gmacs(model, paper)


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_a_published_schedule_is_moved_onto_other_budgets(pool: str) -> None:
    model = timm.create_model("vit_base_patch16_224", global_pool=pool)
    budget = 0.58 * diffrate.gmacs(model)  # between 10.0 and 10.4, which are published
    moved = published_schedule(model, budget)
    assert 0.99 * budget < diffrate.gmacs(model, moved) <= budget
    assert moved.made["family"] == ("ViT-B-DeiT" if pool == "token" else "ViT-B-MAE")
    nearest = diffrate.Schedule.published(
        "deit_base_patch16_224" if pool == "token" else "vit_base_patch16_224.mae", moved.made["paper_gmacs"]
    ).effective
    assert max(abs(a - b) for a, b in zip(moved.merge, nearest.merge, strict=True)) < 12

    def merged(schedule: diffrate.Schedule) -> list[tuple[int, int]]:
        """What each block removes, and merges of it."""
        before = [schedule.tokens, *schedule.merge[:-1]]
        return [(b - m, p - m) for b, p, m in zip(before, schedule.prune, schedule.merge, strict=True)]

    assert any(0 < some < gone for gone, some in merged(moved))
    for (gone, some), (theirs, of_theirs) in zip(merged(moved), merged(nearest), strict=True):
        assert some == (round(gone * of_theirs / theirs) if theirs else 0)


def test_no_published_schedule_for_other_shapes(tiny_vit: nn.Module) -> None:
    with pytest.raises(DiffRateError, match="no schedule is published for 4 blocks"):
        published_schedule(tiny_vit, 0.01)


def test_many_random_schedules_are_those_of_their_seeds() -> None:
    model = embedded.model(pretrained=False)
    budget = 0.5 * diffrate.gmacs(model)
    many = random_schedules(model, budget, range(40))
    assert many[7] == random_schedule(model, budget, 7)
    assert len({schedule.merge for schedule in many}) == 40
    for schedule in many:
        assert 0.99 * budget < diffrate.gmacs(model, schedule) <= budget
        assert schedule.cost["gmacs"] == pytest.approx(diffrate.gmacs(model, schedule))
    freed = random_schedules(model, budget, range(40), last_is_free=True)
    more = [sum(s.merge[:-1]) - sum(other.merge[:-1]) for s, other in zip(freed, many, strict=True)]
    assert min(more) > -5  # tokens, of about 1,200: whole counts do not meet a budget exactly
    assert max(more) > 20
    for schedule in freed:
        assert schedule.merge[-1] == 2
        assert 0.99 * budget < diffrate.gmacs(model, schedule) <= budget


@pytest.mark.parametrize("name", ["embedded", "mean of tokens", "registers"])
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_random_counts_are_even_draws_to_one_power_and_split_by_further_draws(
    name: str, share: float
) -> None:
    model = MODELS[name]()
    layout, budget = backbone_of(model).layout, share * diffrate.gmacs(model)
    depth, prefix = layout.depth, layout.prefix
    images = layout.tokens - prefix
    for seed, schedule in enumerate(random_schedules(model, budget, range(20))):
        even = random.Random(seed)
        falls = depth - 1 if layout.compresses_last_block else depth - 2
        drawn = sorted((even.random() for _ in range(falls)), reverse=True)
        drawn = [1.0, *drawn, *drawn[-1:] * (depth - 1 - falls)]
        # Powers between two ends make n of images x u^power, rounded; the last token stays whatever the power. One
        # power is between them in every block.
        low, high = 0.0, math.inf
        for u, count in zip(drawn[1:], schedule.merge[1:], strict=True):
            n = count - prefix
            low = max(low, math.log((n + 0.5) / images) / math.log(u))
            high = min(high, math.log((n - 0.5) / images) / math.log(u)) if n > 1 else high
        assert 0 < low <= high
        # It is the lowest that meets the budget: below it, one count is higher.
        dearer = [max(1, round(images * u ** (low * (1 - 1e-9)))) + prefix for u in drawn]
        assert sum(dearer) > sum(schedule.merge)
        assert diffrate.gmacs(model, Schedule(dearer, dearer, prefix)) > budget
        merged = [even.random() for _ in range(depth)]
        before = [layout.tokens, *schedule.merge[:-1]]
        for i, (b, p, n) in enumerate(zip(before, schedule.prune, schedule.merge, strict=True)):
            assert p - n == pytest.approx(merged[i] * (b - n), abs=0.5)


def test_random_schedules_differ_by_seed() -> None:
    model = embedded.model(pretrained=False)
    budget = 0.5 * diffrate.gmacs(model)
    first, again, other = (random_schedule(model, budget, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.merge != other.merge
    assert any(p > m for p, m in zip(first.prune, first.merge, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_they_run_and_keep_what_they_say(method: str, tiny_vit: nn.Module) -> None:
    schedule = METHODS[method](tiny_vit, 0.7 * diffrate.gmacs(tiny_vit))
    fast = diffrate.compress(tiny_vit, schedule)
    logits, tokens = fast(torch.randn(2, 3, 32, 32), return_tokens=True)
    assert logits.shape == (2, 3)
    assert tokens.count == schedule.merge[-1]


@pytest.mark.parametrize("method", METHODS)
def test_impossible_budgets_are_refused(method: str, tiny_vit: nn.Module) -> None:
    whole = diffrate.gmacs(tiny_vit)
    for budget in (0.01 * whole, 1.1 * whole):
        with pytest.raises(DiffRateError, match="cannot meet a budget"):
            METHODS[method](tiny_vit, budget)
    assert METHODS[method](tiny_vit, whole).removes_nothing
