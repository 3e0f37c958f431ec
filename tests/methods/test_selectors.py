"""DynamicViT and SPViT against their papers: scores, dropping, masks and losses, token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import diffrate
from conftest import flop_counter, random_vit
from diffrate.methods.dynamicvit import DynamicViT
from diffrate.methods.selection import SelectingModel, Trial, feature_loss, ratio_loss
from diffrate.methods.spvit import SPViT
from diffrate.training import Recipe
from diffrate.training.optimizer import build_optimizer

KINDS = [DynamicViT, SPViT]


def made(kind: type[SelectingModel], model: torch.nn.Module, keep_rate: float) -> SelectingModel:
    """With selectors of weights so large that every part of them shows in what they choose."""
    fast = kind(model, keep_rate)
    torch.manual_seed(1)
    for parameter in fast.selectors.parameters():
        torch.nn.init.normal_(parameter, std=0.8 if kind is SPViT else 0.5)  # no two scores alike
    return fast.eval()


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def mlp(layers: Any, x: Tensor) -> Tensor:
    """Linear layers with GELU between them, by their weights."""
    weights = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
    for i, layer in enumerate(weights):
        x = layer.weight @ x + layer.bias
        x = gelu(x) if i + 1 < len(weights) else x
    return x


def embedded(selector: Any, x: Tensor) -> Tensor:
    norm, linear = selector.embed[0], selector.embed[1]
    x = (x - x.mean()) / (x.var(unbiased=False) + norm.eps).sqrt() * norm.weight + norm.bias
    return gelu(linear.weight @ x + linear.bias)


def dynamicvit_score(selector: Any, tokens: list[Tensor]) -> list[float]:
    """Probability to stay of each token: local half, mean of the global half, scored together."""
    seen = [embedded(selector, x) for x in tokens]
    half = len(seen[0]) // 2
    overall = sum(z[half:] for z in seen) / len(seen)
    return [mlp(selector.score, torch.cat([z[:half], overall])).softmax(0)[0].item() for z in seen]


def spvit_score(selector: Any, tokens: list[Tensor]) -> list[float]:
    """The same on each head's part, weighed by what another MLP says of the heads' means."""
    heads, scores = selector.heads, []
    width = len(tokens[0]) // heads
    parts = [[x[h * width : (h + 1) * width] for h in range(heads)] for x in tokens]
    per_head = [dynamicvit_score(selector, [part[h] for part in parts]) for h in range(heads)]
    for j, part in enumerate(parts):
        weight = mlp(selector.weigh, torch.stack([p.mean() for p in part])).sigmoid()
        scores.append(sum(weight[h].item() * per_head[h][j] for h in range(heads)) / weight.sum().item())
    return scores


@torch.no_grad()
def slow_logits(fast: SelectingModel, images: Tensor, stages: tuple[int, ...], keep: list[int]) -> Tensor:
    """One image at a time, tokens in lists, the full attention matrix; written from the papers."""
    model: Any = fast.original
    prefix, package = model.num_prefix_tokens, isinstance(fast, SPViT)
    score = spvit_score if package else dynamicvit_score
    logits = []
    for image in images:
        x = model._pos_embed(model.patch_embed(image[None]))[0]
        for i, block in enumerate(model.blocks):
            if i in stages:
                tokens = list(x[prefix:])
                probability = score(fast.selectors[stages.index(i)], tokens)
                order = sorted(range(len(tokens)), key=lambda j, p=probability: -p[j])
                stay, go = order[: keep[stages.index(i)]], order[keep[stages.index(i)] :]
                left = [tokens[j] for j in stay]
                if package:
                    total = sum(probability[j] for j in go)
                    left.append(sum(probability[j] * tokens[j] for j in go) / total)
                x = torch.stack([*x[:prefix], *left])
            y = block.norm1(x)
            parts = block.attn.qkv(y).view(len(x), 3, block.attn.num_heads, -1)
            q, k, v = (parts[:, j].transpose(0, 1) for j in range(3))
            weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
            x = x + block.attn.proj((weights @ v).transpose(0, 1).reshape(len(x), -1))
            x = x + block.mlp(block.norm2(x))
        x = model.norm(x)
        pooled = x[prefix:].mean(0) if model.global_pool == "avg" else x[0]
        logits.append(model.head(model.fc_norm(pooled)))
    return torch.stack(logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pool", "prefix"), [("token", 1), ("avg", 1), ("token", 3)])
def test_logits_of_the_rule_token_by_token(kind: type[SelectingModel], pool: str, prefix: int) -> None:
    # In fp64: of tokens whose scores differ by rounding alone, either may stay.
    model = random_vit(depth=4, global_pool=pool, reg_tokens=prefix - 1).double()
    images = torch.randn(2, 3, 32, 32).double()
    fast = made(kind, model, 0.6).double()
    assert fast.stages == (1, 2, 3)
    keep = [38, 23, 13]  # floor of 64 x 0.6, 0.36 and 0.216
    expected = slow_logits(fast, images, (1, 2, 3), keep)
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

    def best(stage: int, log_probability: Tensor, alive: Tensor) -> Tensor:
        score = torch.where(alive > 0, log_probability[..., 0], float("-inf"))
        chosen = score.topk(fast.numbers[stage], dim=1).indices
        return torch.zeros_like(score).scatter(1, chosen, 1.0)

    monkeypatch.setattr(fast, "draw", best)
    with torch.no_grad():
        trial = fast.train()(images)
    torch.testing.assert_close(trial.logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(trial.shares[0] * 64, torch.tensor([38.0, 23.0, 13.0]))
    assert trial.tokens.shape == (3, 64, 32)


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
            return float(
                ratio_loss(torch.stack([fast(images).shares for _ in range(8)]).mean(0), fast.shares)
            )

    before = distance()
    for _ in range(30):
        loss = objective(fast, images, labels)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in fast.selectors.named_parameters():
            assert parameter.grad is not None, name
        optimizer.step()
    assert distance() < 0.5 * before


def test_the_loss_is_the_sum_of_its_four_parts() -> None:
    torch.manual_seed(0)
    model, teacher = random_vit(depth=4), random_vit(depth=4, num_heads=4)
    fast = DynamicViT(model, 0.5).train()
    objective = DynamicViT.objective(fast, Recipe(mixup=0, cutmix=0, smoothing=0), teacher)
    images, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 3, 6, 2])
    trial = Trial(
        torch.randn(4, 7), torch.randn(4, 64, 32), (torch.rand(4, 64) < 0.3).float(), torch.rand(4, 3)
    )
    with torch.no_grad():
        answers, features = teacher(images).softmax(-1), teacher.forward_features(images)[:, 1:]
        loss = objective.loss(trial, images, labels).item()
    log = trial.logits.log_softmax(-1)
    cross_entropy = -sum(log[b, labels[b]].item() for b in range(4)) / 4
    kl = sum(answers[b, c] * (answers[b, c].log() - log[b, c]) for b in range(4) for c in range(7)).item() / 4
    squares, alive = 0.0, 0.0
    for b in range(4):
        for j in range(64):
            if trial.alive[b, j]:
                squares += (trial.tokens[b, j] - features[b, j]).square().mean().item()
                alive += 1
    wanted = (0.5, 0.25, 0.125)
    ratio = sum((wanted[s] - trial.shares[b, s].item()) ** 2 for b in range(4) for s in range(3)) / 12
    assert feature_loss(trial, features).item() == pytest.approx(squares / alive, rel=1e-4)
    assert loss == pytest.approx(cross_entropy + 0.5 * kl + 0.5 * squares / alive + 2 * ratio, rel=1e-4)


@pytest.mark.parametrize(("keep_rate", "gmacs"), [(0.7, 2.9), (0.8, 3.4), (0.9, 4.0)])
def test_gmacs_of_the_paper_on_deit_small(keep_rate: float, gmacs: float) -> None:
    fast = DynamicViT(timm.create_model("deit_small_patch16_224"), keep_rate)
    assert diffrate.gmacs(fast) == pytest.approx(gmacs, rel=0.03)
    kept = [math.floor(196 * keep_rate**s + 1e-9) + 1 for s in (1, 2, 3)]
    assert fast.kept == (197,) * 3 + (kept[0],) * 3 + (kept[1],) * 3 + (kept[2],) * 3


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
