"""Adaptive sampling against its paper, each image alone and without padding."""

from __future__ import annotations

import pytest
import torch
from slow_forward import Seen, slow_logits
from torch import Tensor, nn

import diffrate
from conftest import random_vit
from diffrate.backbones import backbone_of
from diffrate.costs.macs import MacCost
from diffrate.errors import DiffRateError
from diffrate.methods.ats import AdaptiveSampling, sample
from diffrate.methods.policy import PolicyModel


def ats_rule(samples: int, first: int, counts: list[list[int]]):
    """Fayyaz et al., section 3: scores by attention and value norm, inverse transform sampling at fixed points."""

    def rule(seen: Seen) -> tuple[Tensor, Tensor]:
        if seen.block == 0:
            counts.append([])
        if seen.block >= first:
            heads, n, _ = seen.weights.shape
            score = [0.0] * (n - 1)
            for h in range(heads):
                raw = [(seen.weights[h, 0, j] * seen.values[h, j].norm()).item() for j in range(1, n)]
                score = [s + value / sum(raw) / heads for s, value in zip(score, raw, strict=True)]
            running = [sum(score[: j + 1]) for j in range(n - 1)]
            picked = set()
            for k in range(samples):
                point = (2 * k + 1) / (2 * samples)
                picked.add(min(range(n - 1), key=lambda j: abs(running[j] - point)))
            x = seen.x[[0, *(1 + j for j in sorted(picked))]]
            counts[-1].append(len(x))
            return x, torch.ones(len(x))
        counts[-1].append(len(seen.x))
        return seen.x, seen.size

    return rule


@pytest.fixture
def model() -> nn.Module:
    return random_vit(depth=4)


def test_a_padded_batch_gives_the_logits_of_each_image_alone(model: nn.Module) -> None:
    images = torch.randn(6, 3, 32, 32) * torch.linspace(0.2, 3, 6)[:, None, None, None]
    fast = PolicyModel(model, AdaptiveSampling(backbone_of(model).layout, 40))
    counts: list[list[int]] = []
    expected = slow_logits(model, images, ats_rule(40, 1, counts), proportional=False)
    with torch.no_grad():
        torch.testing.assert_close(fast(images), expected, rtol=1e-4, atol=1e-4)
        found = fast.image_counts(images)
        assert found.tolist() == counts
        assert len({tuple(row) for row in counts}) > 1  # so that there was padding
        cost = MacCost.of(model)
        alone = [float(cost.gmacs([float(n) for n in row])) for row in counts]
        assert fast.image_gmacs(images).tolist() == pytest.approx(alone)
    assert diffrate.gmacs(fast) > max(alone)  # all 40 samples different: the most that an image can cost


def test_of_twelve_blocks_the_fourth_is_the_first_to_sample() -> None:
    model = random_vit(depth=12, embed_dim=16)
    policy = AdaptiveSampling(backbone_of(model).layout, 30)
    assert (policy.first, policy.kept) == (3, (65,) * 3 + (31,) * 9)
    counts: list[list[int]] = []
    images = torch.randn(2, 3, 32, 32)
    slow_logits(model, images, ats_rule(30, 3, counts), proportional=False)
    with torch.no_grad():
        assert PolicyModel(model, policy).image_counts(images).tolist() == counts
    assert all(row[2] == 65 and row[3] <= 31 for row in counts)


def test_uniform_scores_pick_evenly_and_a_peak_takes_most_samples() -> None:
    # Quantiles 1/8, 3/8, 5/8, 7/8 of running sums 1/8 … 8/8 are met exactly by every second token.
    assert sample(torch.full((1, 8), 1 / 8), 4).tolist() == [[True, False] * 4]
    peaked = torch.tensor([[0.01, 0.95, 0.01, 0.01, 0.02]])
    assert int(sample(peaked, 5).sum()) < 4
    assert not sample(torch.tensor([[0.5, 0.5, 0.0]]), 50)[0, 2]  # padding has no score and is never picked


def test_budget_is_the_mean_cost_of_the_images(model: nn.Module) -> None:
    images = torch.randn(16, 3, 32, 32)
    budget = 0.6 * diffrate.gmacs(model)
    policy = AdaptiveSampling.at(model, budget, images)
    with torch.no_grad():
        spent = PolicyModel(model, policy).image_gmacs(images).mean().item()
        more = AdaptiveSampling(backbone_of(model).layout, policy.samples + 1)
        assert spent <= budget < PolicyModel(model, more).image_gmacs(images).mean().item()


@pytest.mark.parametrize("further", [0.3, 0.8])
def test_a_budget_above_its_reach_takes_more_samples_and_then_a_later_block(
    model: nn.Module, further: float
) -> None:
    images = torch.randn(8, 3, 32, 32)
    layout = backbone_of(model).layout

    def spent(samples: int, first: int) -> float:
        with torch.no_grad():
            fast = PolicyModel(model, AdaptiveSampling(layout, samples, first))
            return fast.image_gmacs(images).mean().item()

    near, far = spent(64, 1), spent(64, 2)  # as many samples as tokens
    budget = near + further * (far - near)
    policy = AdaptiveSampling.at(model, budget, images)
    assert policy.first == 1
    assert policy.samples > 64
    assert spent(policy.samples, 1) <= budget < spent(policy.samples + 1, 1)
    later = AdaptiveSampling.at(model, far, images)
    assert later.first == 2
    assert later.samples >= 64


def test_patches_of_what_was_not_picked_are_marked(model: nn.Module) -> None:
    images = torch.randn(3, 3, 32, 32)
    fast = PolicyModel(model, AdaptiveSampling(backbone_of(model).layout, 30))
    with torch.no_grad():
        _, tokens = fast(images, return_tokens=True)
    assert tokens.patches is not None
    assert tokens.size is not None
    for patches, size in zip(tokens.patches, tokens.size, strict=True):
        alive = patches[patches >= 0]
        assert sorted(alive.tolist()) == [i for i in range(1, len(size)) if size[i] > 0]
        stand_ins = ~patches[patches < 0]
        assert (size[stand_ins] > 0).all()


def test_what_cannot_be_sampled_is_refused(model: nn.Module) -> None:
    with pytest.raises(DiffRateError, match="cannot meet a budget"):
        AdaptiveSampling.at(model, 0.05 * diffrate.gmacs(model), torch.randn(2, 3, 32, 32))
    with pytest.raises(DiffRateError, match="no class token"):
        AdaptiveSampling(backbone_of(random_vit(class_token=False, global_pool="avg")).layout, 5)
    with pytest.raises(DiffRateError, match="at least one sample"):
        AdaptiveSampling(backbone_of(model).layout, 0)
