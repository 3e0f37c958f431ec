"""ATS: adaptive token sampling (Fayyaz et al., "Adaptive Token Sampling for Efficient Vision Transformers", 2022).

From a quarter of the depth on (block 4 of 12), an image token's significance is the class token's attention to it
times the norm of its value, normalised over the image tokens of each head, mean over heads. Their running sum is a
distribution function; K fixed quantiles (1/2K, 3/2K, …) each pick the token whose running sum is nearest, and what is
picked at least once stays. Images with concentrated attention keep fewer tokens.

What that costs: tokens per image differ, so a batch is padded to its longest image. Padding is computed and thrown
away; MACs "per image" leave it out, as the paper does, and only images that run alone reach them.

Not as in the paper: attention is computed, and charged, for every token that enters a block, where the paper computes
only the rows of those that it picked; and where as many samples as tokens cannot use up a budget, it takes more, and
where those would use up what the next block on costs, it starts there.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from diffrate import ranking
from diffrate.backbones import Layout, backbone_of
from diffrate.backbones.base import Attention
from diffrate.errors import DiffRateError
from diffrate.methods.fit import smallest_within
from diffrate.methods.policy import Policy, PolicyModel
from diffrate.modes import evaluating
from diffrate.portions import Portions
from diffrate.reduction import keep_first, move_patches
from diffrate.tokens import Tokens

FIRST = 1 / 4  # of the depth: the blocks before keep all tokens
MOST = 8  # samples for each token, where budgets are loose
BATCH = 64  # images at a time, while costs are measured


class AdaptiveSampling(Policy):
    """samples  K, the quantiles that pick tokens in each block from `first` on."""

    name: ClassVar[str] = "ats"
    proportional: ClassVar[bool] = True  # padding has size 0, so that its logarithm hides it from every query
    by_image: ClassVar[bool] = True

    def __init__(self, layout: Layout, samples: int, first: int | None = None) -> None:
        if not layout.class_token:
            raise DiffRateError("ATS samples by class attention, and this model has no class token")
        if samples < 1:
            raise DiffRateError(f"ATS needs at least one sample, not {samples}")
        self.samples = samples
        self.first = first_block(layout) if first is None else first
        most = min(layout.tokens, layout.prefix + samples)
        self.kept = tuple(layout.tokens if i < self.first else most for i in range(layout.depth))

    @classmethod
    def at(cls, model: nn.Module, budget: float, images: Tensor) -> AdaptiveSampling:
        """As many samples as cost at most `budget` GMACs on average over `images`; costs need no labels.

        Sampling starts in the last block from which on as many samples as tokens do not cost too much. Between that
        and the next one lie more samples, up to MOST a token: the more quantiles, the more tokens are picked.
        """
        layout = backbone_of(model).layout
        tokens = layout.tokens - layout.prefix
        portions = Portions("what ATS measures")

        @functools.cache
        def gmacs(samples: int, first: int) -> float:
            sampled = PolicyModel(model, cls(layout, samples, first))
            with evaluating(model), torch.inference_mode():
                parts = [portions.joined(sampled.image_gmacs, part) for part in images.split(BATCH)]
                return float(torch.cat(parts).mean())

        first = first_block(layout)
        while first < layout.depth - 1 and gmacs(tokens, first + 1) <= budget:
            first += 1
        most = tokens if gmacs(tokens, first) > budget else MOST * tokens
        if gmacs(most, first) <= budget:
            return cls(layout, most, first)

        def samples(t: float) -> int:
            return max(1, round((1 - t) * most))

        t = smallest_within(lambda t: gmacs(samples(t), first), budget, "ATS", halvings=most.bit_length() + 1)
        return cls(layout, samples(t), first)

    def removes(self, i: int) -> bool:
        return i >= self.first

    def reduce(self, i: int, attention: Attention, bias: Tensor | None, attended: Tokens) -> Tokens:
        picked = sample(significance(attention, bias, attended.prefix), self.samples)
        return keep_picked(attended, picked)

    def settings(self) -> dict[str, Any]:
        return {"samples": self.samples, "first_block": self.first}


def first_block(layout: Layout) -> int:
    return max(1, round(layout.depth * FIRST))


def significance(attention: Attention, bias: Tensor | None, prefix: int) -> Tensor:
    """(B, N - prefix) scores that sum to one for each image; padding has none."""
    row = ranking.class_attention_row(attention.q, attention.k, attention.scale, bias)  # (B, heads, N)
    score = (row * attention.v.float().norm(dim=-1))[:, :, prefix:]
    return (score / score.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)).mean(dim=1)


def sample(score: Tensor, samples: int) -> Tensor:
    """(B, N - prefix) bool: the tokens that at least one of the quantiles picks."""
    running = score.cumsum(dim=1)
    quantile = (torch.arange(samples, device=score.device) + 0.5) / samples  # 1/2K, 3/2K, …
    distance = (running.unsqueeze(1) - quantile[None, :, None]).abs()  # (B, K, N - prefix)
    # A token without significance repeats the running sum before it: the first of equals is the one that reached it.
    nearest = distance.argmin(dim=2)
    return torch.zeros_like(score, dtype=torch.bool).scatter(1, nearest, True) & (score > 0)


def keep_picked(tokens: Tokens, picked: Tensor) -> Tokens:
    """The prefix and the picked tokens in their order, padded to the longest image with tokens of size 0."""
    b, prefix = len(picked), tokens.prefix
    alive = torch.cat([picked.new_ones(b, prefix), picked], dim=1)  # (B, N)
    order = (~alive).long().argsort(dim=1, stable=True)  # those that stay in front, each part in its order
    longest = int(alive.sum(dim=1).max())
    patches = tokens.patches
    if patches is not None:
        patches = move_patches(patches, _destinations(tokens.x, alive, order, prefix))
    kept, _ = keep_first(replace(tokens, patches=None), None, order, longest)
    size = alive.gather(1, order[:, :longest]).float()
    return replace(kept, size=size, patches=patches)


def _destinations(x: Tensor, alive: Tensor, order: Tensor, prefix: int) -> Tensor:
    """(B, N) new place of every token; ~place of its most similar surviving image token for those that go."""
    place = torch.empty_like(order).scatter(
        1, order, torch.arange(x.shape[1], device=x.device).expand_as(order)
    )
    unit = torch.nn.functional.normalize(x.float(), dim=-1)
    similarity = unit @ unit.transpose(1, 2)
    candidate = alive.clone()
    candidate[:, :prefix] = False
    nearest = similarity.masked_fill(~candidate[:, None], -2.0).argmax(dim=2)
    return torch.where(alive, place, ~place.gather(1, nearest))
