"""EViT: keep the attentive tokens, fuse the others into one (Liang et al., "Not All Patches Are What You Need", 2022).

At a quarter, half and three quarters of the depth (blocks 4, 7 and 10 of 12), between attention and MLP, a share of
the image tokens stays: those with the highest class attention, mean over heads. The others become one more token,
their sum weighted by that attention. It stays a token like any other in the blocks that follow.

Not as in the paper: `finetune` trains at the final keep rate from the first step, where the paper lowers it to that
over the first epochs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from diffrate import ranking
from diffrate.backbones import Layout, backbone_of
from diffrate.backbones.base import Attention
from diffrate.costs.macs import MacCost
from diffrate.errors import DiffRateError
from diffrate.methods.fit import smallest_within
from diffrate.methods.policy import Policy
from diffrate.reduction import move_patches, rank, take
from diffrate.tokens import Tokens

STAGES = (1 / 4, 1 / 2, 3 / 4)  # of the depth


class EViT(Policy):
    """keep_rate  share of the image tokens that each stage keeps; fuse  whether the others become a token."""

    name: ClassVar[str] = "evit"

    def __init__(self, layout: Layout, keep_rate: float, fuse: bool = True) -> None:
        if not layout.class_token:
            raise DiffRateError("EViT ranks by class attention, and this model has no class token")
        if not 0 < keep_rate <= 1:
            raise DiffRateError(f"EViT's keep rate goes from 0 to 1, not {keep_rate:g}")
        self.keep_rate, self.fuse = keep_rate, fuse
        self.stages = stages_of(layout)
        self.attentive: dict[int, int] = {}  # image tokens that a stage keeps as they are
        n, kept = layout.tokens, []
        for i in range(layout.depth):
            if i in self.stages:
                # The tolerance keeps 0.7 x 10, which is 7.000…01, from becoming 8.
                attentive = math.ceil(keep_rate * (n - layout.prefix) - 1e-9)
                if attentive + fuse < n - layout.prefix:
                    self.attentive[i] = attentive
                    n = layout.prefix + attentive + fuse
            kept.append(n)
        self.kept = tuple(kept)

    @classmethod
    def at(cls, model: nn.Module, budget: float) -> EViT:
        """The highest keep rate that costs at most `budget` GMACs."""
        backbone = backbone_of(model)
        cost = MacCost.of_backbone(backbone)

        def policy(t: float) -> EViT:
            return cls(backbone.layout, max(1 - t, 1e-6))

        t = smallest_within(lambda t: float(cost.gmacs([float(n) for n in policy(t).kept])), budget, "EViT")
        return policy(t)

    def removes(self, i: int) -> bool:
        return i in self.attentive

    def reduce(self, i: int, attention: Attention, bias: Tensor | None, attended: Tokens) -> Tokens:
        attentiveness = ranking.class_attention(
            attention.q, attention.k, attention.scale, bias, attended.prefix
        )
        return keep_and_fuse(attended, attentiveness, self.attentive[i], self.fuse)

    def settings(self) -> dict[str, Any]:
        return {"keep_rate": self.keep_rate, "stages": list(self.stages), "fuse": self.fuse}


def stages_of(layout: Layout) -> tuple[int, ...]:
    """The blocks at which tokens go, here and in the methods that follow EViT and DynamicViT in this."""
    stages = {max(1, round(layout.depth * share)) for share in STAGES}
    return tuple(sorted(stage for stage in stages if stage < layout.depth))


def keep_and_fuse(tokens: Tokens, attentiveness: Tensor, keep: int, fuse: bool) -> Tokens:
    """Keep the `keep` most attentive image tokens; the others become one token, their attention-weighted sum.

    Where attention looks at positions, which the paper's models do not, that token has its most attentive member's.

    attentiveness  (B, N - prefix) class attention of the image tokens.
    """
    prefix = tokens.prefix
    order = rank(attentiveness, prefix)
    first, last = order[:, : prefix + keep], order[:, prefix + keep :]
    parts = [take(tokens.x, first)]
    if fuse:
        weight = attentiveness.gather(1, last - prefix).to(tokens.x.dtype)
        parts.append((take(tokens.x, last) * weight.unsqueeze(-1)).sum(dim=1, keepdim=True))
    patches = tokens.patches
    if patches is not None:
        places = torch.arange(first.shape[1], device=order.device).expand(len(order), -1)
        # Fused patches belong to the new token; without one, the last token stands in for what was dropped.
        gone = torch.full_like(last, prefix + keep if fuse else ~(prefix + keep - 1))
        patches = move_patches(
            patches, torch.empty_like(order).scatter(1, order, torch.cat([places, gone], 1))
        )
    positions = tokens.positions
    if positions is not None:
        positions = positions.taken(order[:, : prefix + keep + fuse])
    return replace(
        tokens.with_features(torch.cat(parts, dim=1)), size=None, patches=patches, positions=positions
    )
