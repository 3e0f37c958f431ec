"""DynamicViT's and SPViT's selectors and what they drop, token by token: what the package's are held against."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from diffrate.methods.dynamicvit import DynamicViT
from diffrate.methods.selection import SelectingModel
from diffrate.methods.spvit import SPViT

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


def best(numbers: list[list[int]]) -> Callable[[int, Tensor, Tensor], Tensor]:
    """A draw without chance: of image b, the `numbers[b][stage]` tokens that are likeliest to stay."""

    def draw(stage: int, log_probability: Tensor, alive: Tensor) -> Tensor:
        score = torch.where(alive > 0, log_probability[..., 0], float("-inf"))
        place = score.argsort(dim=1, descending=True).argsort(dim=1)
        return (place < torch.tensor([each[stage] for each in numbers])[:, None]).float()

    return draw
