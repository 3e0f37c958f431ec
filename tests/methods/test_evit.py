"""EViT against its paper: counts, cost, and a forward pass that follows the rule token by token."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from slow_forward import Seen, slow_logits
from torch import Tensor

import diffrate
from conftest import random_vit
from diffrate.backbones import backbone_of
from diffrate.errors import DiffRateError
from diffrate.methods.evit import EViT, keep_and_fuse, stages_of
from diffrate.methods.policy import PolicyModel
from diffrate.tokens import start


def evit_rule(keep_rate: float, stages: tuple[int, ...], prefix: int = 1):
    def rule(seen: Seen) -> tuple[Tensor, Tensor]:
        if seen.block not in stages:
            return seen.x, seen.size
        attentiveness = [seen.weights[:, 0, j].mean().item() for j in range(prefix, len(seen.x))]
        keep = math.ceil(keep_rate * len(attentiveness) - 1e-9)
        ranked = sorted(range(len(attentiveness)), key=lambda j: -attentiveness[j])
        kept = [seen.x[j] for j in range(prefix)] + [seen.x[prefix + j] for j in ranked[:keep]]
        fused = sum(attentiveness[j] * seen.x[prefix + j] for j in ranked[keep:])
        x = torch.stack([*kept, fused])
        return x, torch.ones(len(x))

    return rule


@pytest.mark.parametrize(("pool", "prefix"), [("token", 1), ("avg", 1), ("token", 5)])
def test_logits_of_the_rule_token_by_token(pool: str, prefix: int) -> None:
    model = random_vit(depth=4, global_pool=pool, reg_tokens=prefix - 1)
    images = torch.randn(3, 3, 32, 32)
    fast = PolicyModel(model, EViT(backbone_of(model).layout, 0.6))
    expected = slow_logits(model, images, evit_rule(0.6, (1, 2, 3), prefix), proportional=False)
    with torch.no_grad():
        torch.testing.assert_close(fast(images), expected, rtol=1e-4, atol=1e-4)
        assert (fast(images) - model(images)).abs().max() > 0.01


def test_counts_at_blocks_4_7_and_10() -> None:
    layout = backbone_of(timm.create_model("deit_small_patch16_224")).layout
    # 196 image tokens: ceil(0.7 x 196) = 138 and the fused one make 139, then ceil(97.3) + 1 = 99, then 70 + 1.
    assert EViT(layout, 0.7).kept == (197,) * 3 + (140,) * 3 + (100,) * 3 + (72,) * 3
    assert EViT(layout, 1.0).kept == (197,) * 12
    assert [stages_of(backbone_of(random_vit(depth=depth)).layout) for depth in (1, 2, 3)] == [
        (),
        (1,),
        (1, 2),
    ]


@pytest.mark.parametrize(("keep_rate", "gmacs"), [(0.5, 2.3), (0.7, 3.0)])
def test_gmacs_of_the_paper_on_deit_small(keep_rate: float, gmacs: float) -> None:
    model = timm.create_model("deit_small_patch16_224")
    fast = PolicyModel(model, EViT(backbone_of(model).layout, keep_rate))
    assert diffrate.gmacs(fast) == pytest.approx(gmacs, abs=0.05)


@pytest.mark.parametrize("gmacs", [0.655, 0.81, 1.0])
def test_meets_a_budget_from_below(gmacs: float) -> None:
    model = timm.create_model("vit_tiny_patch16_224")
    found = PolicyModel(model, EViT.at(model, gmacs))
    assert 0.99 * gmacs < diffrate.gmacs(found) <= gmacs
    # The keep rates that were recorded for these budgets: 0.53, 0.69 and 0.84.
    expected = {0.655: 0.53, 0.81: 0.69, 1.0: 0.84}[gmacs]
    assert found.policy.settings()["keep_rate"] == pytest.approx(expected, abs=0.01)


def test_patches_of_fused_tokens_belong_to_the_fused_one() -> None:
    tokens = start(torch.randn(1, 6, 4), 1, track=True)
    attentiveness = torch.tensor([[0.1, 0.5, 0.05, 0.2, 0.15]])
    fused = keep_and_fuse(tokens, attentiveness, 2, fuse=True)
    assert fused.patches is not None
    assert fused.patches.tolist() == [[3, 1, 3, 2, 3]]
    expected = 0.1 * tokens.x[0, 1] + 0.05 * tokens.x[0, 3] + 0.15 * tokens.x[0, 5]
    torch.testing.assert_close(fused.x[0, 3], expected)
    dropped = keep_and_fuse(tokens, attentiveness, 2, fuse=False)
    assert dropped.count == 3
    assert dropped.patches is not None
    assert (dropped.patches < 0).tolist() == [[True, False, True, False, True]]


def test_models_without_a_class_token_are_refused() -> None:
    model = random_vit(class_token=False, global_pool="avg")
    with pytest.raises(DiffRateError, match="no class token"):
        EViT.at(model, 0.5 * diffrate.gmacs(model))
