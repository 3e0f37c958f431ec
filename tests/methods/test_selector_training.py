"""DynamicViT and SPViT in training, against their papers: draws, gradients and losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm
import torch
from slow_selectors import KINDS, best, made, slow_walk
from torch import Tensor, nn

from conftest import random_vit
from diffrate.methods.dynamicvit import DynamicViT
from diffrate.methods.selection import SelectingModel, ratio_loss
from diffrate.training import Recipe
from diffrate.training.optimizer import build_optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_0_or_1_and_keep_as_often_as_selectors_say(kind: type[SelectingModel]) -> None:
    fast = kind(random_vit(depth=4), 0.6)
    torch.manual_seed(0)
    stay = torch.tensor([0.02, 0.3, 0.5, 0.9])
    log_probability = torch.stack([stay, 1 - stay], dim=-1).log().expand(20_000, 4, 2)
    drawn = fast.draw(0, log_probability, torch.ones(20_000, 4))
    torch.testing.assert_close(drawn, (drawn > 0.5).float(), rtol=0, atol=1e-6)
    assert drawn.mean(dim=0).tolist() == pytest.approx(stay.tolist(), abs=0.015)  # four standard errors


@pytest.mark.parametrize(("odds", "mean"), [(1, 1 / 6), (9, 9 * (10 * math.log(9) - 16) / 512)])
def test_the_gradient_of_a_draw_is_that_of_a_soft_one_at_temperature_one(odds: int, mean: float) -> None:
    """The soft draw of two is s = sigmoid(log odds + z) with z logistic, and its derivative s (1 - s).

    For odds a to one that has the mean a ((a + 1) log a - 2 (a - 1)) / (a - 1)^3: of z = log(u / (1 - u)), u from 0 to
    1. At even odds s itself is u.
    """
    fast = DynamicViT(random_vit(depth=4), 0.6)
    torch.manual_seed(0)
    probability = torch.tensor([odds / (odds + 1), 1 / (odds + 1)])
    log_probability = probability.log().repeat(20_000, 1, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(
        fast.draw(0, log_probability, torch.ones(20_000, 1)).sum(), log_probability
    )
    assert gradient[..., 0].mean().item() == pytest.approx(mean, abs=0.0025)  # more than four standard errors
    torch.testing.assert_close(gradient[..., 1], -gradient[..., 0])


def with_a_label_in_one_token(count: int) -> tuple[Any, Tensor, Tensor, Tensor]:
    """A model of four classes, images, labels, and which of its 64 tokens has an image's label: (count,) all three.

    A token is a pixel of 16 features. The label is one of the first four, and the others' features are noise. Only in
    the last block does the class token look at them, at all of them alike.
    """
    shape = {"img_size": 8, "patch_size": 1, "in_chans": 16, "embed_dim": 16, "depth": 4, "num_heads": 2}
    model: Any = timm.create_model("vit_tiny_patch16_224", num_classes=4, **shape)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.zeros_(parameter)
    same = torch.eye(16)
    with torch.no_grad():
        model.patch_embed.proj.weight.copy_(same[:, :, None, None])
        model.cls_token[..., 15] = 10  # so long that the last norm does not undo what attention adds
        model.blocks[3].attn.qkv.weight[32:] = same
        model.blocks[3].attn.proj.weight.copy_(same)
        model.head.weight.copy_(same[:4])
    labels, where = torch.randint(4, (count,)), torch.randint(64, (count,))
    pixels = torch.cat([torch.zeros(count, 64, 8), torch.randn(count, 64, 8)], dim=-1)
    pixels[range(count), where] = 3 * same[labels]
    return model, pixels.transpose(1, 2).unflatten(2, (8, 8)), labels, where


@pytest.mark.parametrize("kind", KINDS)
def test_cross_entropy_alone_wants_the_token_with_the_label_to_stay(
    kind: type[SelectingModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    for weight in ("KL", "FEATURES", "RATIO"):
        monkeypatch.setattr(f"diffrate.methods.selection.{weight}", 0.0)
    torch.manual_seed(0)
    model, images, labels, where = with_a_label_in_one_token(128)
    assert torch.equal(model(images).argmax(dim=1), labels)
    fast = kind(model, 0.6).train()
    said: list[Tensor] = []
    for selector in fast.selectors:
        selector.register_forward_hook(lambda _, __, log_probability: said.append(log_probability))
    trial = fast(images)
    objective = kind.objective(fast, Recipe(mixup=0, cutmix=0, smoothing=0), model)
    gradients = torch.autograd.grad(objective.loss(trial, images, labels), said)
    # Where it stayed: of what is dropped, SPViT's package has a part.
    stayed = trial.alive[range(128), where] > 0.5
    for gradient in gradients:
        towards = -gradient[stayed, :64, 0]  # that a token stays
        others = torch.ones_like(towards).scatter(1, where[stayed, None], 0.0) > 0
        assert towards[~others].mean() > 1e-6
        assert towards[others].mean() < -1e-7  # they take attention from it


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_reaches_selectors_and_a_step_moves_towards_the_ratio(
    kind: type[SelectingModel],
) -> None:
    torch.manual_seed(0)
    fast = kind(random_vit(depth=4), 0.85).train()
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(7, (8,))
    recipe = Recipe(mixup=0, cutmix=0)
    objective = kind.objective(fast, recipe, random_vit(depth=4).eval())
    optimizer = torch.optim.Adam(fast.selectors.parameters(), lr=3e-3)

    def distance() -> float:
        with torch.no_grad():
            shares = torch.stack([fast(images).shares for _ in range(8)]).mean(0)
            return float(ratio_loss(shares, fast.shares, fast.ratio_by_image))

    before = distance()
    for _ in range(30):
        loss = objective(fast, images, labels)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in fast.selectors.named_parameters():
            assert parameter.grad is not None, name
        optimizer.step()
    assert distance() < 0.5 * before


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_images_is_the_sum_of_its_four_parts(
    kind: type[SelectingModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From images to the loss: what is left, its features and how much it is follow from the scores alone."""
    model, teacher = random_vit(depth=4), random_vit(depth=4, num_heads=4)
    model.head.weight.data *= 2
    fast = made(kind, model, 0.5).double().train()
    for parameter in teacher.parameters():
        nn.init.normal_(parameter, std=0.5)
    images, labels = torch.randn(3, 3, 32, 32).double(), [0, 3, 6]
    keep = [[60, 50, 9], [50, 20, 12], [32, 16, 8]]
    monkeypatch.setattr(fast, "draw", best(keep))
    objective = kind.objective(fast, Recipe(mixup=0, cutmix=0, smoothing=0), teacher.double())
    walks = [slow_walk(fast, image, (1, 2, 3), each) for image, each in zip(images, keep, strict=True)]
    with torch.no_grad():
        loss = objective(fast, images, torch.tensor(labels)).item()
        answers, features = teacher(images).softmax(-1), teacher.forward_features(images)[:, 1:]
    log = torch.stack([logits for logits, _ in walks]).log_softmax(-1)
    cross_entropy = -sum(log[b, labels[b]].item() for b in range(3)) / 3
    kl = sum(answers[b, c] * (answers[b, c].log() - log[b, c]) for b in range(3) for c in range(7)).item() / 3
    squares = [(x - features[b, j]).square().mean().item() for b in range(3) for j, x in walks[b][1].items()]
    wanted = (0.5, 0.25, 0.125)
    if kind is DynamicViT:  # of every image
        ratio = sum((wanted[s] - keep[b][s] / 64) ** 2 for b in range(3) for s in range(3)) / 9
    else:  # of the batch
        ratio = sum((wanted[s] - sum(keep[b][s] / 64 for b in range(3)) / 3) ** 2 for s in range(3)) / 3
    parts = [cross_entropy, 0.5 * kl, 0.5 * sum(squares) / len(squares), 2 * ratio]
    assert min(parts) > 0.01 * sum(parts)
    assert loss == pytest.approx(sum(parts), rel=1e-4)


def test_selectors_learn_faster_than_the_model() -> None:
    fast = DynamicViT(random_vit(depth=4), 0.5)
    recipe = Recipe(lr=2e-5, min_lr=1e-6, warmup_epochs=0, epochs=2)
    optimizer, scheduler = build_optimizer(fast, recipe, 10, torch.device("cpu"))
    own = {id(p) for p in fast.selectors.parameters()}

    def rates(mine: bool) -> list[float]:
        groups = optimizer.param_groups
        return sorted({g["lr"] for g in groups for p in g["params"] if (id(p) in own) == mine})

    assert rates(True) == pytest.approx([1e-3])
    assert rates(False) == pytest.approx([2e-5])
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(fast.parameters()))
    scheduler.step_update(20)
    assert rates(True) == pytest.approx([5e-5])  # 50 times the lowest rate
