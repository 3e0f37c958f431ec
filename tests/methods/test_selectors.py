"""DynamicViT and SPViT against their papers: scores, dropping, masks and losses, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import diffrate
from conftest import flop_counter, random_vit
from diffrate.methods.dynamicvit import DynamicViT
from diffrate.methods.selection import SelectingModel, ratio_loss
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


def layers_of_the_paper(selector: nn.Module, width: int, heads: int = 0) -> nn.ModuleList:
    """A norm and a layer for tokens of this width, three that score, two that weigh heads; the selector's weights.

    Both papers score by an MLP that halves the width, halves it again and ends in two; SPViT head by head, one MLP
    for all heads.
    """
    widths = [(width, width), (width, width // 2), (width // 2, width // 4), (width // 4, 2)]
    widths += [(heads, heads)] * 2 if heads else []
    layers = nn.ModuleList([nn.LayerNorm(width), *(nn.Linear(*each) for each in widths)])
    given, wanted = list(selector.parameters()), list(layers.parameters())
    assert [p.shape for p in given] == [p.shape for p in wanted]
    for ours, theirs in zip(wanted, given, strict=True):
        ours.data = theirs.data
    return layers


def part_score(layers: nn.ModuleList, tokens: list[Tensor]) -> list[Tensor]:
    """Probability to stay of each token: local half, mean of the global half, scored together."""
    norm, embed, first, second, last = layers[:5]
    seen = [gelu(embed(norm(x))) for x in tokens]
    half = len(seen[0]) // 2
    overall = sum(z[half:] for z in seen) / len(seen)
    both = [torch.cat([z[:half], overall]) for z in seen]
    scores = [last(gelu(second(gelu(first(x))))) for x in both]
    return [(a / (a + b)) for a, b in (x.exp() for x in scores)]


def slow_score(selector: Any, tokens: list[Tensor], heads: int = 0) -> list[float]:
    """Probability to stay of each token; with heads SPViT's, weighed by what another MLP says of the heads' means."""
    if not heads:
        return [p.item() for p in part_score(layers_of_the_paper(selector, len(tokens[0])), tokens)]
    width = len(tokens[0]) // heads
    layers = layers_of_the_paper(selector, width, heads)
    parts = [[x[h * width : (h + 1) * width] for h in range(heads)] for x in tokens]
    per_head = [part_score(layers, [part[h] for part in parts]) for h in range(heads)]
    scores = []
    for j, part in enumerate(parts):
        opinion = layers[6](gelu(layers[5](torch.stack([p.mean() for p in part]))))
        weight = [1 / (1 + math.exp(-x)) for x in opinion.tolist()]
        scores.append(sum(w * per_head[h][j].item() for h, w in enumerate(weight)) / sum(weight))
    return scores


@torch.no_grad()
def slow_walk(
    fast: SelectingModel, image: Tensor, stages: tuple[int, ...], keep: list[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits of an image, and the last features of each patch that is left; written from the papers.

    Tokens in lists, the full attention matrix.
    """
    model: Any = fast.original
    prefix, package = model.num_prefix_tokens, isinstance(fast, SPViT)
    x = model._pos_embed(model.patch_embed(image[None]))[0]
    patches = list(range(len(x) - prefix))
    for i, block in enumerate(model.blocks):
        if i in stages:
            tokens, stage = list(x[prefix:]), stages.index(i)
            heads = block.attn.num_heads if package else 0
            probability = slow_score(fast.selectors[stage], tokens, heads)
            order = sorted(range(len(tokens)), key=lambda j, p=probability: -p[j])
            stay, go = order[: keep[stage]], order[keep[stage] :]
            left, patches = [tokens[j] for j in stay], [patches[j] for j in stay]
            if package:
                total = sum(probability[j] for j in go)
                left.append(sum(probability[j] * tokens[j] for j in go) / total)
                patches.append(-1)
            x = torch.stack([*x[:prefix], *left])
        y = block.norm1(x)
        parts = block.attn.qkv(y).view(len(x), 3, block.attn.num_heads, -1)
        q, k, v = (parts[:, j].transpose(0, 1) for j in range(3))
        weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + block.attn.proj((weights @ v).transpose(0, 1).reshape(len(x), -1))
        x = x + block.mlp(block.norm2(x))
    x = model.norm(x)
    pooled = x[prefix:].mean(0) if model.global_pool == "avg" else x[0]
    features = {patch: token for patch, token in zip(patches, x[prefix:], strict=True) if patch >= 0}
    return model.head(model.fc_norm(pooled)), features


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


def best(numbers: list[list[int]]) -> Callable[[int, Tensor, Tensor], Tensor]:
    """A draw without chance: of image b, the `numbers[b][stage]` tokens that are likeliest to stay."""

    def draw(stage: int, log_probability: Tensor, alive: Tensor) -> Tensor:
        score = torch.where(alive > 0, log_probability[..., 0], float("-inf"))
        place = score.argsort(dim=1, descending=True).argsort(dim=1)
        return (place < torch.tensor([each[stage] for each in numbers])[:, None]).float()

    return draw


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
