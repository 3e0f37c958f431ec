"""SPViT: soft token pruning (Kong et al., "SPViT: Enabling Faster Vision Transformers via Soft Token Pruning", 2022).

A selector scores tokens head by head: an MLP on each head's part of the features, local and mean over the live tokens
side by side. How much a head's word counts comes, token by token, from another small MLP on the mean of each head's
features. What is dropped is not lost: its mean, weighted by the probability to stay, goes on as one package token, a
token like any other in the stages that follow. Training and dropping: selection.py, with stages at a quarter, half and
three quarters of the depth. The paper picks the share that each stage keeps from a table of latencies; here a budget of
MACs sets it, and all stages keep the same share. Its progressive insertion of selectors, last block first, is not here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from diffrate.backbones.base import Backbone, linear_macs
from diffrate.errors import DiffRateError
from diffrate.methods.selection import SelectingModel, Selector, local_and_global, perceptron
from diffrate.reduction import move_patches, rank
from diffrate.tokens import Tokens

TINY = torch.finfo(torch.float32).tiny


class MultiHeadSelector(Selector):
    """heads  parts that the features fall into, those of the model's attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise DiffRateError(
                f"SPViT scores head by head, and {dim} features do not fall into {heads} heads"
            )
        width = dim // heads
        self.heads = heads
        self.embed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * (width // 2)), nn.GELU())
        self.score = perceptron(2 * (width // 2), width // 2, max(width // 4, 1), 2)
        self.weigh = perceptron(heads, heads, heads)
        self.macs = heads * (linear_macs(self.embed) + linear_macs(self.score)) + linear_macs(self.weigh)

    def forward(self, x: Tensor, alive: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self.heads, -1))  # (B, N, heads, d)
        wide = torch.promote_types(x.dtype, torch.float32)  # in half precision nearly equal scores tie
        probability = self.score(local_and_global(self.embed(parts), alive)).to(wide).softmax(dim=-1)
        weight = self.weigh(parts.mean(dim=-1)).to(wide).sigmoid()  # (B, N, heads)
        weight = weight / weight.sum(dim=-1, keepdim=True).clamp_min(TINY)
        return (probability * weight.unsqueeze(-1)).sum(dim=2).clamp_min(TINY).log()


class SPViT(SelectingModel):
    name: ClassVar[str] = "spvit"
    adds: ClassVar[int] = 1
    ratio_by_image: ClassVar[bool] = False  # in training an image that needs more tokens may keep them

    def __init__(self, original: nn.Module, keep_rate: float) -> None:
        super().__init__(original, keep_rate)
        if type(self.backbone).positions is not Backbone.positions:
            raise DiffRateError(
                "SPViT's package token has no position, and this model's attention asks for one"
            )

    @classmethod
    def new_selector(cls, backbone: Backbone) -> Selector:
        return MultiHeadSelector(backbone.layout.dim, backbone.block_products(0).heads)

    def drop(self, tokens: Tokens, score: Tensor, keep: int) -> Tokens:
        prefix, order = tokens.prefix, rank(score, tokens.prefix)
        gone = torch.ones_like(score).scatter(1, order[:, prefix : prefix + keep] - prefix, 0.0)
        package = package_of(tokens.x[:, prefix:], gone * score.exp())
        kept = super().drop(tokens, score, keep)
        patches = tokens.patches
        if patches is not None:  # what was dropped belongs to the package
            place = torch.arange(order.shape[1], device=order.device).clamp_max(prefix + keep)
            patches = move_patches(patches, torch.empty_like(order).scatter(1, order, place.expand_as(order)))
        return replace(kept.with_features(torch.cat([kept.x, package], dim=1)), patches=patches)

    def mask(self, x: Tensor, alive: Tensor, left: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
        prefix = self.backbone.layout.prefix
        gone = alive[:, prefix:] - left
        package = package_of(x[:, prefix:], gone * score.exp())
        x, alive = torch.cat([x, package], dim=1), super().mask(x, alive, left, score)[1]
        there = (gone.sum(dim=1, keepdim=True) > 0).to(alive.dtype)  # nothing was dropped: no package
        return x, torch.cat([alive, there], dim=1)


def package_of(x: Tensor, weight: Tensor) -> Tensor:
    """(B, 1, C) the mean of x (B, N, C), weighted by (B, N)."""
    share = weight / weight.sum(dim=1, keepdim=True).clamp_min(TINY)
    return (x * share.unsqueeze(-1).to(x.dtype)).sum(dim=1, keepdim=True)
