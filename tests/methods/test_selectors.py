"""DynamicViT and SPViT against their papers: scores, dropping, masks and costs, token by token."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from slow_selectors import KINDS, best, made, slow_score, slow_walk
from torch import nn

import diffrate
from conftest import flop_counter, random_vit
from diffrate.methods.dynamicvit import DynamicViT
from diffrate.methods.selection import SelectingModel
from diffrate.methods.spvit import SPViT


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_papers_layers(kind: type[SelectingModel]) -> None:
    fast = made(kind, random_vit(embed_dim=48, num_heads=3), 0.6).double()
    x, alive = torch.randn(2, 20, 48).double(), (torch.rand(2, 20) < 0.7).double()
    with torch.no_grad():
        for selector in fast.selectors:
            probability = selector(x, alive).exp()
            torch.testing.assert_close(probability.sum(dim=-1), torch.ones(2, 20).double())
            for b in range(2):
                there = alive[b] > 0
                expected = slow_score(selector, list(x[b, there]), 3 if kind is SPViT else 0)
                torch.testing.assert_close(probability[b, there, 0], torch.tensor(expected).double())


def test_parameters_of_selectors_on_deit_small() -> None:
    model = timm.create_model("deit_small_patch16_224")
    whole = 22_050_664
    norm, embed, score = 2 * 384, 384 * 385, 192 * 385 + 96 * 193 + 2 * 97
    assert norm + embed + score == 241_250
    assert parameters(DynamicViT(model, 0.7)) == whole + 3 * 241_250
    norm, embed, score, weigh = 2 * 64, 64 * 65, 32 * 65 + 16 * 33 + 2 * 17, 2 * 6 * 7
    assert norm + embed + score + weigh == 7_014
    assert parameters(SPViT(model, 0.7)) == whole + 3 * 7_014
    # As in the log of a training beside the authors' code, of selectors that did not weigh heads yet.
    assert parameters(SPViT(model, 0.7)) - 3 * weigh == 22_071_454


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pool", "prefix"), [("token", 1), ("avg", 1), ("token", 3)])
def test_logits_of_the_rule_token_by_token(kind: type[SelectingModel], pool: str, prefix: int) -> None:
    # In fp64: of tokens whose scores differ by rounding alone, either may stay.
    model = random_vit(depth=4, global_pool=pool, reg_tokens=prefix - 1).double()
    images = torch.randn(2, 3, 32, 32).double()
    fast = made(kind, model, 0.6).double()
    assert fast.stages == (1, 2, 3)
    keep = [38, 23, 13]  # floor of 64 x 0.6, 0.36 and 0.216
    expected = torch.stack([slow_walk(fast, image, (1, 2, 3), keep)[0] for image in images])
    with torch.no_grad():
        torch.testing.assert_close(fast(images), expected, rtol=1e-4, atol=1e-4)
        assert (fast(images) - model(images)).abs().max() > 0.01
    adds = 1 if kind is SPViT else 0
    assert fast.kept == (prefix + 64, *(prefix + n + adds for n in keep))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_masks_of_what_inference_drops_give_its_logits(
    kind: type[SelectingModel], pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_vit(depth=4, global_pool=pool)
    images = torch.randn(3, 3, 32, 32)
    fast = made(kind, model, 0.6)
    with torch.no_grad():
        expected = fast(images)

    monkeypatch.setattr(fast, "draw", best([list(fast.numbers)] * 3))
    with torch.no_grad():
        trial = fast.train()(images)
    torch.testing.assert_close(trial.logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(trial.shares[0] * 64, torch.tensor([38.0, 23.0, 13.0]))
    assert trial.tokens.shape == (3, 64, 32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("keep_rate", "paper"), [(0.7, 2.9), (0.8, 3.4), (0.9, 4.0)])
def test_gmacs_on_deit_small(kind: type[SelectingModel], keep_rate: float, paper: float) -> None:
    fast = kind(timm.create_model("deit_small_patch16_224"), keep_rate)
    adds = 1 if kind is SPViT else 0
    images = [196, *(math.floor(196 * keep_rate**s + 1e-9) + adds for s in (1, 2, 3))]
    assert fast.kept == tuple(1 + n for n in images for _ in range(3))
    scores = 384 * 384 + 384 * 192 + 192 * 96 + 96 * 2
    if kind is SPViT:
        scores = 6 * (64 * 64 + 64 * 32 + 32 * 16 + 16 * 2) + 2 * 6 * 6
    blocks = sum(12 * n * 384**2 + 2 * n**2 * 384 for n in fast.kept)
    macs = 196 * 768 * 384 + blocks + 384 * 1000 + sum(images[:3]) * scores
    assert diffrate.gmacs(fast) == pytest.approx(macs / 1e9, rel=1e-9)
    if kind is DynamicViT:
        assert math.floor(10 * diffrate.gmacs(fast)) == 10 * paper  # which has one digit, cut off


@pytest.mark.parametrize("kind", KINDS)
def test_macs_are_those_that_torch_counts(kind: type[SelectingModel]) -> None:
    fast = kind(timm.create_model("vit_tiny_patch16_224").eval(), 0.6).eval()
    with flop_counter() as counter:
        fast(torch.zeros(1, 3, 224, 224))
    assert diffrate.gmacs(fast) == pytest.approx(counter.get_total_flops() / 2e9, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gmacs", [0.655, 1.0])
def test_meets_a_budget_from_below(kind: type[SelectingModel], gmacs: float) -> None:
    fast = kind.at(timm.create_model("vit_tiny_patch16_224"), gmacs)
    assert 0.99 * gmacs < diffrate.gmacs(fast) <= gmacs


def test_patches_of_dropped_tokens_belong_to_the_package() -> None:
    fast = made(SPViT, random_vit(depth=4), 0.5)
    with torch.no_grad():
        traced = fast.trace(torch.randn(1, 3, 32, 32))
    last = traced[-1]
    assert last.patches is not None
    assert last.count == 1 + 8 + 1
    assert bool((last.patches >= 1).all())  # nothing is lost
    members = last.patches[0].bincount(minlength=10)
    assert int(members[9]) > 1
    assert int(members[members > 1].sum()) >= 64 - 8  # eight kept, earlier packages perhaps among them


def test_state_goes_and_comes_with_the_selectors() -> None:
    fast, other = (made(DynamicViT, random_vit(depth=4), 0.5) for _ in range(2))
    state = fast.state_dict()
    assert {"blocks.0.attn.qkv.weight", "selectors.0.score.0.weight"} < state.keys()
    for value in other.parameters():
        torch.nn.init.zeros_(value)
    other.load_state_dict(state)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(fast(images), other(images))
