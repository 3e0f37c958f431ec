"""Schedules around the present one, and the slopes that their losses have."""

import random
from dataclasses import replace

import pytest
import torch

from conftest import random_vit
from diffrate.backbones import backbone_of
from diffrate.costs.macs import MacCost
from diffrate.searching import design
from diffrate.searching.budget import Space

COUNTS = torch.tensor([65.0, 60.3, 48.2, 30.0, 14.1, 1], dtype=torch.float64)
FREE = slice(1, 5)
NONE = torch.zeros(32, 0, dtype=torch.float64)  # other numbers than counts


@pytest.fixture
def space():
    backbone = backbone_of(random_vit(depth=6))
    return Space.of(backbone, MacCost.of_backbone(backbone))


@pytest.mark.parametrize("order", [8, 12, 20, 24, 32])
def test_columns_are_orthogonal(order):
    signs = design.hadamard(order)
    assert torch.equal(signs.abs(), torch.ones(order, order, dtype=torch.float64))
    assert torch.equal(signs.T @ signs, order * torch.eye(order, dtype=torch.float64))
    assert (signs[:, 0] == 1).all()


def test_each_count_goes_up_in_half_of_the_schedules_and_down_in_the_others(space):
    counts = torch.tensor([65.0, 50, 30, 16, 8, 1], dtype=torch.float64)
    around, ways = design.around(counts, space, random.Random(3))
    assert ways.shape == (8, 0)
    assert around.shape == (8, 6)
    assert torch.equal(around, around.round())
    moved = (around - counts)[:, FREE]
    assert moved.abs().mean(0).tolist() == pytest.approx([5, 3, 2, 1], abs=0.51)
    assert torch.equal(moved.sign().sum(0), torch.zeros(4, dtype=torch.float64))
    # Against every other block: both went up in a quarter of the schedules.
    assert all(((moved[:, i] > 0) & (moved[:, j] > 0)).sum() == 2 for i in range(4) for j in range(i))
    assert (around[:, 0] == 65).all()
    assert (around[:, 5] == 1).all()
    assert torch.equal(around, design.around(counts, space, random.Random(3))[0])
    others = torch.stack([design.around(counts, space, random.Random(seed))[0] for seed in range(40)])
    assert len(others.unique(dim=0)) > 30
    ups = (others[:, :, FREE] > counts[FREE]).double().mean(dim=0)  # (8, 4) how often, over draws
    assert ((ups > 0.2) & (ups < 0.8)).all()  # no schedule has the same part in every step


@pytest.mark.parametrize(
    ("depth", "schedules"), [(4, 8), (8, 8), (9, 12), (12, 12), (13, 20), (24, 24), (32, 32)]
)
def test_deeper_models_take_more_schedules(depth, schedules):
    backbone = backbone_of(random_vit(depth=depth))
    space = Space.of(backbone, MacCost.of_backbone(backbone))
    around, _ = design.around(torch.linspace(65, 1, depth, dtype=torch.float64), space, random.Random(0))
    assert around.shape == (design.size(space), depth) == (schedules, depth)


def test_counts_stay_within_bounds_and_fall(space):
    counts = torch.tensor([65.0, 65, 64, 64, 2, 1], dtype=torch.float64)
    around, _ = design.around(counts, space, random.Random(0))
    assert (around.diff(dim=1) <= 0).all()
    assert (around >= space.least).all()
    assert (around <= space.most).all()
    assert len(around.unique(dim=0)) > 4


def test_slopes_are_those_of_a_line_and_see_no_curvature(space):
    wanted = torch.tensor([0.0, -0.3, 0.2, -0.05, 0.4, 0.0], dtype=torch.float64)
    measured, _ = design.around(COUNTS, space, random.Random(1))
    moved = measured - COUNTS
    losses = 2.0 + moved @ wanted
    loss, found, _ = design.slopes(COUNTS, space, measured, losses, NONE[:8])
    assert found.tolist() == pytest.approx(wanted.tolist(), rel=0.05, abs=0.01)
    assert loss == pytest.approx(2.0, abs=0.01)
    bent = losses + 0.05 * (moved[:, 1] / 9).square() + 0.05 * (moved[:, 3] / 4.5).square()
    assert design.slopes(COUNTS, space, measured, bent, NONE[:8])[1].tolist() == pytest.approx(
        found.tolist(), abs=0.003
    )


def test_noise_is_shared_by_all_schedules(space):
    """The variance of a slope is that of one loss by the number of schedules, as of a mean over all of them."""
    torch.manual_seed(0)
    counts = torch.tensor([65.0, 50, 30, 20, 10, 1], dtype=torch.float64)
    measured, _ = design.around(counts, space, random.Random(1))
    draws = [
        design.slopes(counts, space, measured, torch.randn(8).double(), NONE[:8])[1] for _ in range(2000)
    ]
    change = (0.1 * counts)[FREE].clamp_min(1)
    variance = (torch.stack(draws)[:, FREE] * change).var(dim=0)
    assert variance.tolist() == pytest.approx([1 / 8] * 4, rel=0.15)


@pytest.mark.parametrize("depth", [6, 12])
def test_level_counts_each_have_their_slope(depth):
    """None is taken for a change of all schedules: where a count cannot rise, others make room half of the time."""
    backbone = backbone_of(random_vit(depth=depth))
    space = Space.of(backbone, MacCost.of_backbone(backbone))
    counts = torch.tensor([65.0, *[40.0] * (depth - 2), 1], dtype=torch.float64)
    found, losses = [], []
    for seed in range(200):
        measured, _ = design.around(counts, space, random.Random(seed))
        falls = 1 - 0.1 * (measured - counts)[:, 1:-1].sum(dim=1)
        loss, slopes, _ = design.slopes(counts, space, measured, falls, NONE[: len(falls)])
        found.append(slopes)
        losses.append(loss)
    mean = torch.stack(found).mean(dim=0)
    assert mean[1:-1].tolist() == pytest.approx([-0.1] * (depth - 2), rel=0.2)
    assert sum(losses) / len(losses) == pytest.approx(1.0, abs=0.1)


def test_tied_blocks_move_as_one_and_the_first_has_their_slope(space):
    tied = replace(space, ties=((0,), (1, 2), (3, 4), (5,)))
    counts = torch.tensor([65.0, 50, 50, 20, 20, 1], dtype=torch.float64)
    measured, _ = design.around(counts, tied, random.Random(0))
    assert measured.shape == (8, 6)
    assert torch.equal(measured[:, 1], measured[:, 2])
    assert torch.equal(measured[:, 3], measured[:, 4])
    losses = 1 - 0.1 * (measured - counts).sum(dim=1)
    _, found, _ = design.slopes(counts, tied, measured, losses, NONE[:8])
    assert found.tolist() == pytest.approx([0, -0.2, 0, -0.2, 0, 0], abs=0.01)


def test_other_numbers_change_evenly_and_have_slopes_of_their_own(space):
    counts = torch.tensor([65.0, 50, 30, 16, 8, 1], dtype=torch.float64)
    measured, ways = design.around(counts, space, random.Random(2), others=3)
    assert ways.shape == (len(measured), 3) == (design.size(space, 3), 3)
    assert torch.equal(ways.abs(), torch.ones_like(ways))
    signs = torch.cat([(measured - counts)[:, FREE].sign(), ways], dim=1)
    assert torch.equal(signs.T @ signs, len(signs) * torch.eye(7, dtype=torch.float64))
    of_counts = torch.tensor([0.0, -0.3, 0.2, -0.05, 0.4, 0.0], dtype=torch.float64)
    of_others = torch.tensor([0.7, -0.2, 0.0], dtype=torch.float64)
    losses = 1 + (measured - counts) @ of_counts + ways @ of_others
    loss, found, others = design.slopes(counts, space, measured, losses, ways)
    assert loss == pytest.approx(1, abs=0.02)
    assert found.tolist() == pytest.approx(of_counts.tolist(), rel=0.05, abs=0.01)
    assert others.tolist() == pytest.approx(of_others.tolist(), rel=0.05, abs=0.01)
