"""Reading budgets, and schedules that meet one."""

import itertools
import math
from dataclasses import replace

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffrate.backbones import backbone_of
from diffrate.costs import Costs, Design, GemminiCost, MacCost, Workload
from diffrate.errors import DiffRateError
from diffrate.isotonic import monotone
from diffrate.searching.budget import (
    Budget,
    Space,
    check_budget,
    log_cosh,
    parse_budgets,
    parse_gmacs,
    project,
    rounded,
)
from diffrate.searching.starts import starts


def space_of(**changes):
    model = timm.create_model("vit_tiny_patch16_224", depth=6, **changes)
    backbone = backbone_of(model)
    return Space.of(backbone, MacCost.of_backbone(backbone))


SPACES = [space_of(), space_of(global_pool="avg"), space_of(reg_tokens=3)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("0.8G", [0.8]), ("60%", [0.6]), ("800M", [0.8]), ("0.7G, 90%,0.8g", [0.9, 0.8, 0.7]), (".5G", [0.5])],
)
def test_budgets_are_read_largest_first(text, wanted):
    assert [b.targets["gmacs"] for b in parse_budgets(text, {"gmacs": 1.0})] == pytest.approx(wanted)


@pytest.mark.parametrize("text", ["", "fast", "0.8", "0.8G,", "-1G", "1e9G", "50%%", "nanG"])
def test_unreadable_budgets_say_how_to_write_one(text):
    with pytest.raises(DiffRateError, match=r"0\.8G"):
        parse_budgets(text, {"gmacs": 1.0})


def test_impossible_budgets_name_what_is_possible():
    whole = float(SPACES[0].gmacs(torch.full_like(SPACES[0].most, 197)))
    for budget in (0.01, whole, 2.0):
        with pytest.raises(DiffRateError, match=f"{whole:.4g}"):
            check_budget(budget, SPACES[0])


@given(st.lists(st.floats(0, 200), min_size=1, max_size=12))
def test_monotone_is_the_nearest_falling_sequence(values):
    counts = torch.tensor(values, dtype=torch.float64)
    pooled = monotone(counts, torch.ones_like(counts))
    assert (pooled[1:] <= pooled[:-1] + 1e-9).all()
    # The nearest point of a convex set: no falling sequence lies at an acute angle to the way there.
    sorted_back = pooled.flip(0).sort(descending=True).values
    for other in (pooled - 1, torch.full_like(pooled, float(counts.mean())), sorted_back):
        assert float((counts - pooled) @ (other - pooled)) <= 1e-6


@given(
    st.sampled_from(range(3)),
    st.lists(st.floats(-50, 250), min_size=6, max_size=6),
    st.floats(0.35, 0.88),  # keeping only the prefix in the last block is worth a tenth here
)
def test_projection_meets_the_budget_within_bounds(which, values, share):
    space = SPACES[which]
    budget = share * space.cost.of_schedule(None)
    counts = torch.tensor(values[: len(space.least)], dtype=torch.float64)
    step = torch.where(space.free, 1.0, 1e-3).double()
    on = project(counts, budget, space, step)
    assert float(space.gmacs(on)) == pytest.approx(budget, rel=1e-3)
    assert (on[1:] <= on[:-1] + 1e-6).all()
    whole = rounded(on, budget, space)
    gmacs = float(space.gmacs(torch.tensor(whole, dtype=torch.float64)))
    assert 0.99 * budget <= gmacs <= budget
    assert all(a >= b for a, b in itertools.pairwise(whole))
    assert whole[0] == 197 + (3 if which == 2 else 0)


@pytest.mark.parametrize("space", SPACES, ids=["class", "mean-pooled", "registers"])
def test_last_block_keeps_the_prefix_or_is_left_alone(space):
    budget = 0.6 * space.cost.of_schedule(None)
    for start in starts(space, budget):
        every = space.every_block(rounded(start, budget, space))
        assert len(every) == 6
        pooled = len(space.least) == 5
        assert every[-1] == (every[-2] if pooled else space.prefix)


def test_the_paper_s_shape_is_among_the_starts():
    """For a model of the paper's own depth, the published schedule nearest in cost, moved onto the budget."""
    backbone = backbone_of(timm.create_model("vit_tiny_patch16_224"))
    space = Space.of(backbone, MacCost.of_backbone(backbone))
    published = [197, 196, 190, 172, 154, 125, 107, 96, 84, 78, 70]  # DeiT-T at 0.8 G
    start = rounded(starts(space, 0.81)[-1], 0.81, space)
    assert max(abs(a - b) for a, b in zip(start[:-1], published, strict=True)) <= 1
    assert start[-1] == 1


WHOLE = {"gmacs": 1.0, "latency_ms": 70.0, "power_at_rate_mw": 140.0}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2.1ms", [{"latency_ms": 2.1}]),
        ("0.5G,37ms, 90mW", [{"gmacs": 0.5, "latency_ms": 37.0, "power_at_rate_mw": 90.0}]),
        ("0.8G,37ms,60%", [{"gmacs": 0.8, "latency_ms": 37.0}, {"gmacs": 0.6, "latency_ms": 37.0}]),
        ("500M,400M", [{"gmacs": 0.5}, {"gmacs": 0.4}]),
    ],
)
def test_metrics_are_met_together_and_several_values_are_several_budgets(text, wanted):
    assert [dict(budget.targets) for budget in parse_budgets(text, WHOLE)] == wanted


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("2ms,1ms,0.8G,0.7G", "only one metric may have several values"),
        ("5mJ", "needs --hardware"),
        ("0ms", "cannot read"),
        ("3s", "cannot read .* 90mW or 5mJ"),
    ],
)
def test_mixes_that_cannot_be_read(text, sentence):
    with pytest.raises(DiffRateError, match=sentence):
        parse_budgets(text, WHOLE)


def test_milliseconds_need_a_cost_model():
    assert parse_gmacs("50%,0.3G,75%", 0.8) == pytest.approx([0.6, 0.4, 0.3])
    for text in ("2ms", "0.3G,5mJ"):
        with pytest.raises(DiffRateError, match="here it is in MACs"):
            parse_gmacs(text, 0.8)
    with pytest.raises(DiffRateError, match=r"write it as 0\.8G \(GMACs\) or 60%$"):
        parse_gmacs("65x", 0.8)
    with pytest.raises(DiffRateError, match="--profile-table or --hardware"):
        parse_budgets("2ms", {"gmacs": 1.0})


def test_losses_are_the_papers():
    prices = {"gmacs": torch.tensor(3.0), "latency_ms": torch.tensor(50.0)}
    loss = Budget({"gmacs": 2.5, "latency_ms": 40.0}).loss(prices, {"gmacs": 5.0, "latency_ms": 2.0})
    assert float(loss) == pytest.approx(5 * 0.25 + 2 * math.log(math.cosh(0.25)), rel=1e-5)
    assert log_cosh(torch.tensor([-3e4, 0.0, 3e4])).tolist() == pytest.approx(
        [3e4 - math.log(2), 0, 3e4 - math.log(2)]
    )


def gemmini_space(**changes):
    backbone = backbone_of(timm.create_model("vit_tiny_patch16_224", depth=6))
    design = GemminiCost(Workload.of_backbone(backbone), Design(**changes))
    return Space.of(backbone, Costs([MacCost.of_backbone(backbone), design]))


def test_a_mix_meets_every_target_and_the_tightest_one_closely():
    space = gemmini_space()
    whole = space.cost.price_of(None)
    for shares in ((0.6, 0.9, 0.9), (0.9, 0.6, 0.9), (0.9, 0.9, 0.6)):
        metrics = ("gmacs", "latency_ms", "power_at_rate_mw")
        budget = Budget({m: share * whole[m] for m, share in zip(metrics, shares, strict=True)})
        check_budget(budget, space)
        kept = rounded(project(space.most, budget, space, space.freely()), budget, space)
        prices = space.price(torch.tensor(kept).double())
        used = {m: float(prices[m]) / target for m, target in budget.targets.items()}
        assert max(used.values()) <= 1
        assert used[metrics[shares.index(0.6)]] > 0.95
        assert all(a >= b for a, b in itertools.pairwise(kept))


def test_counts_rise_for_free_to_what_the_array_holds():
    """A 32x32 array takes 100 tokens in the time of 128, and 70 in that of 96; but energy counts every token."""
    space = gemmini_space(mesh_rows=32, mesh_columns=32, bus_bits=512)
    counts = torch.tensor([197.0, 100, 100, 70, 70, 1]).double()
    latency, power = (float(space.price(counts)[m]) for m in ("latency_ms", "power_at_rate_mw"))
    assert rounded(counts, Budget({"latency_ms": latency}), space) == [197, 128, 128, 96, 96, 1]
    assert rounded(counts, Budget({"latency_ms": latency, "power_at_rate_mw": power}), space) == [
        197,
        100,
        100,
        70,
        70,
        1,
    ]


def test_hardware_budgets_below_what_is_possible_name_it():
    space = gemmini_space()
    least = float(space.price(space.least)["latency_ms"])
    with pytest.raises(DiffRateError, match=f"ms cannot be met.*{least:.4g} at the least"):
        check_budget(Budget({"gmacs": 0.5, "latency_ms": 0.5 * least}), space)


def test_two_models_of_one_metric_or_for_another_network_are_refused():
    cost = gemmini_space().cost
    with pytest.raises(DiffRateError, match="6 blocks and 200 tokens"):
        Costs([cost, SPACES[2].cost])
    with pytest.raises(DiffRateError, match="two cost models"):
        Costs([cost, cost])


def test_tied_blocks_share_a_count():
    space = SPACES[0]
    tied = replace(space, ties=((0,), (1, 2), (3, 4), (5,)))
    budget = 0.6 * space.cost.of_schedule(None)
    on = project(torch.tensor([197.0, 150, 90, 120, 40, 1]).double(), budget, tied, tied.freely())
    kept = rounded(on, budget, tied)
    assert kept[1] == kept[2] > kept[3] == kept[4]
    gmacs = float(space.gmacs(torch.tensor(kept).double()))
    assert 0.97 * budget < gmacs <= budget
