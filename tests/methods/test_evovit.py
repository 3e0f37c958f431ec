"""Evo-ViT against its paper: slow and fast tokens in a forward pass that follows the rule token by token."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import diffrate
from conftest import flop_counter, random_vit
from diffrate.errors import DiffRateError
from diffrate.methods.evovit import EvoViT
from diffrate.training import Recipe


def block(model: Any, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Block i on tokens (N, C), and the class token's attention, mean over heads (N,)."""
    part = model.blocks[i]
    parts = part.attn.qkv(part.norm1(x)).view(len(x), 3, part.attn.num_heads, -1)
    q, k, v = (parts[:, j].transpose(0, 1) for j in range(3))
    weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
    x = x + part.attn.proj((weights @ v).transpose(0, 1).reshape(len(x), -1))
    return x + part.mlp(part.norm2(x)), weights[:, 0].mean(0)


@torch.no_grad()
def slow_tokens(model: Any, image: Tensor, slow: int, first: int) -> tuple[Tensor, list[set[int]]]:
    """(N, C) after the last norm, and who ran in each block from `first` on: one token at a time."""
    prefix = model.num_prefix_tokens
    x = model._pos_embed(model.patch_embed(image[None]))[0]
    attention: dict[int, float] = {}  # a placeholder's entry stays as it is
    ran: list[set[int]] = []
    for i in range(len(model.blocks)):
        if i < first:
            x, row = block(model, i, x)
            for j in range(prefix, len(x)):
                attention[j] = row[j].item() if i == 0 else 0.5 * attention[j] + 0.5 * row[j].item()
            continue
        ranked = sorted(attention, key=lambda j: -attention[j])
        chosen, others = ranked[:slow], ranked[slow:]
        ran.append(set(chosen))
        total = sum(attention[j] for j in others)
        representative = sum(attention[j] / total * x[j] for j in others)
        after, row = block(model, i, torch.stack([*x[:prefix], *(x[j] for j in chosen), representative]))
        moved = x.clone()
        moved[:prefix] = after[:prefix]
        for place, j in enumerate(chosen):
            moved[j] = after[prefix + place]
            attention[j] = 0.5 * attention[j] + 0.5 * row[prefix + place].item()
        for j in others:
            moved[j] = x[j] + after[-1] - representative
        x = moved
    return model.norm(x), ran


@pytest.mark.parametrize("prefix", [1, 3])
def test_tokens_and_logits_of_the_rule_token_by_token(prefix: int) -> None:
    model = random_vit(depth=6, reg_tokens=prefix - 1)
    for part in model.blocks[2:]:
        # Attention that spreads while every token runs, and is sharp after: most of those that then run are passed
        # over, and fall behind placeholders that keep theirs.
        part.attn.qkv.weight.data *= 4
    images = torch.randn(2, 3, 32, 32)
    fast = EvoViT(model, 20)
    assert fast.first == 2
    slow = [slow_tokens(model, image, 20, 2) for image in images]
    expected = torch.stack([x for x, _ in slow])
    for _, ran in slow:
        assert any(before != after for before, after in itertools.pairwise(ran))  # tokens change sides
    with torch.no_grad():
        tokens = fast.forward_tokens(images)
        torch.testing.assert_close(tokens.x, expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(fast(images), model.head(expected[:, 0]), rtol=1e-3, atol=1e-3)
        assert (fast(images) - model(images)).abs().max() > 0.01
    assert fast.kept == (64 + prefix,) * 2 + (20 + prefix + 1,) * 4


def test_every_token_slow_is_the_model_itself() -> None:
    model = random_vit(depth=4)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(EvoViT(model, 64)(images), model(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefix", [1, 3])
@pytest.mark.parametrize("distillation", [0.0, 0.3])
def test_in_training_the_mean_token_is_classified_too(prefix: int, distillation: float) -> None:
    """By the labels alone: what a teacher says, if there is one, is of the class token."""
    model, teacher = random_vit(depth=4, reg_tokens=prefix - 1), random_vit(depth=4, num_heads=4)
    for parameter in teacher.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.head.weight.data *= 20  # so that tokens that differ a little have other answers
    fast = EvoViT(model, 20)
    images, labels = torch.randn(3, 3, 32, 32), torch.tensor([1, 4, 6])
    recipe = Recipe(mixup=0, cutmix=0, smoothing=0.1, distillation=distillation)
    objective = EvoViT.objective(fast, recipe, teacher)
    with torch.no_grad():
        expected = torch.stack([slow_tokens(model, image, 20, 1)[0] for image in images])
        loss = objective(fast.train(), images, labels).item()
        both = [expected[:, 0], sum(expected[:, j] for j in range(prefix, prefix + 64)) / 64]
        own, mean = ((x @ model.head.weight.T + model.head.bias).log_softmax(-1) for x in both)
        answers = teacher(images).softmax(-1)
    # Smoothed labels: a tenth of their weight is spread over the seven classes.
    first, assisted = (
        -sum(0.9 * x[b, labels[b]].item() + 0.1 * x[b].sum().item() / 7 for b in range(3)) / 3
        for x in (own, mean)
    )
    kl = (answers * (answers.log() - own)).sum().item() / 3
    parts = [(1 - distillation) * first, distillation * kl, assisted]
    assert abs(first - assisted) > 0.02 * sum(parts)
    assert loss == pytest.approx(sum(parts), rel=1e-4)


def test_a_head_that_pools_says_the_same_twice_and_every_weight_gets_a_gradient() -> None:
    images = torch.randn(3, 3, 32, 32)
    pooled = EvoViT(random_vit(depth=4, global_pool="avg"), 20).train()
    with torch.no_grad():
        logits, assisted = pooled(images)
    torch.testing.assert_close(assisted, logits)
    fast = EvoViT(random_vit(depth=4), 20).train()
    objective = EvoViT.objective(fast, Recipe(mixup=0, cutmix=0))
    objective(fast, images, torch.tensor([1, 4, 6])).backward()
    assert all(p.grad is not None for p in fast.original.parameters())


def test_gmacs_are_those_that_torch_counts_and_meet_budgets() -> None:
    model = timm.create_model("vit_tiny_patch16_224").eval()
    for budget in (0.655, 0.81, 1.0):
        fast = EvoViT.at(model, budget).eval()
        assert 0.99 * budget < diffrate.gmacs(fast) <= budget
    with flop_counter() as counter:
        fast(torch.zeros(1, 3, 224, 224))
    assert diffrate.gmacs(fast) == pytest.approx(counter.get_total_flops() / 2e9, rel=2e-3)
    # The paper: DeiT-S with half of the tokens from the fifth block on has about 3.0 GFLOPs.
    small = EvoViT(timm.create_model("deit_small_patch16_224"), 98)
    assert diffrate.gmacs(small) == pytest.approx(3.0, abs=0.05)


def test_models_without_a_class_token_are_refused() -> None:
    with pytest.raises(DiffRateError, match="no class token"):
        EvoViT(random_vit(class_token=False, global_pool="avg"), 20)
