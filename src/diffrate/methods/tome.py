"""ToMe: bipartite merging by keys (Bolya et al., "Token Merging: Your ViT But Faster", 2023), and two successors.

In every block, between attention and MLP, tokens are split in two sets by turns; each of the first set finds its most
similar token of the second, by cosine similarity of the keys, mean over heads; the r most similar pairs merge into
means weighted by size. Attention is proportional to size. The prefix is never merged.

Not as in the paper: r is what a budget leaves, and one between whole numbers goes by its rounded running sum, where the
paper's are whole; attention is proportional in every model, where the paper leaves that out for MAE models whose
weights are not tuned.

size-aware  (after ATM, Lee and Choi 2025) the smaller half of the tokens joins the larger half, so that two large
            tokens do not merge; equal sizes are split by turns. Here in every block, where the paper does so in the
            last ones only. ATM's thresholds in place of r are not here.
norm        (after ToFu, Kim et al. 2024) a merged token keeps the largest norm among its members, which a mean
            would shrink. ToFu's pruning in the first blocks is not here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from diffrate.backbones import Layout, backbone_of
from diffrate.backbones.base import Attention
from diffrate.costs.macs import MacCost
from diffrate.methods.fit import smallest_within
from diffrate.methods.policy import Policy
from diffrate.reduction import join, keep_first, most_similar, take
from diffrate.tokens import Tokens


class ToMe(Policy):
    """r  tokens merged in each block, at most half of the image tokens; split and norm as above."""

    name: ClassVar[str] = "tome"
    proportional: ClassVar[bool] = True
    split_by_size: ClassVar[bool] = False
    keeps_norm: ClassVar[bool] = False

    def __init__(self, layout: Layout, r: tuple[int, ...]) -> None:
        n, kept, merged = layout.tokens, [], []
        for wanted in r:
            merged.append(max(0, min(wanted, (n - layout.prefix) // 2)))
            n -= merged[-1]
            kept.append(n)
        self.r, self.kept = tuple(merged), tuple(kept)

    @classmethod
    def constant(cls, layout: Layout, r: float) -> ToMe:
        """r tokens in every block; between whole numbers, the sum so far is what is rounded."""
        return cls(layout, _whole(layout, lambda i: r))

    @classmethod
    def decreasing(cls, layout: Layout, r: float) -> ToMe:
        """2r tokens in the first block, falling evenly to none in the last: as many in all as a constant r."""
        last = max(layout.depth - 1, 1)
        return cls(layout, _whole(layout, lambda i: 2 * r * (1 - i / last)))

    @classmethod
    def at(cls, model: nn.Module, budget: float, decreasing: bool = False) -> ToMe:
        """The smallest r that costs at most `budget` GMACs."""
        backbone = backbone_of(model)
        layout = backbone.layout
        cost = MacCost.of_backbone(backbone)

        def policy(t: float) -> ToMe:
            return (cls.decreasing if decreasing else cls.constant)(layout, t * layout.tokens / 2)

        t = smallest_within(lambda t: float(cost.gmacs([float(n) for n in policy(t).kept])), budget, "ToMe")
        return policy(t)

    def removes(self, i: int) -> bool:
        return self.r[i] > 0

    def reduce(self, i: int, attention: Attention, bias: Tensor | None, attended: Tokens) -> Tokens:
        return merge_pairs(
            attended, attention.k.float().mean(dim=1), self.r[i], self.split_by_size, self.keeps_norm
        )

    def settings(self) -> dict[str, Any]:
        return {"r": list(self.r)}


class SizeAware(ToMe):
    name: ClassVar[str] = "atm"
    split_by_size: ClassVar[bool] = True


class NormPreserving(ToMe):
    name: ClassVar[str] = "tofu"
    keeps_norm: ClassVar[bool] = True


def merge_pairs(
    tokens: Tokens, metric: Tensor, r: int, by_size: bool = False, keep_norm: bool = False
) -> Tokens:
    """Merge the r most similar pairs of a bipartite matching; what is left: prefix, first set, second set.

    metric  (B, N, d) what similarity is measured on.
    """
    n, prefix = tokens.count, tokens.prefix
    sizes = tokens.sizes()
    joining, staying = _halves(sizes, prefix, by_size)
    similarity, target = most_similar(take(metric, joining), take(metric, staying))
    by_similarity = similarity.argsort(dim=1, descending=True, stable=True)
    merged, unmerged = by_similarity[:, :r], by_similarity[:, r:].sort(dim=1).values
    first = torch.arange(prefix, device=joining.device).expand(len(joining), -1)
    order = torch.cat([first, joining.gather(1, unmerged), staying, joining.gather(1, merged)], dim=1)
    tokens, weight = keep_first(tokens, sizes, order, n)
    to = target.gather(1, merged) + prefix + unmerged.shape[1]
    # A similarity of one makes sizes add up, as ToMe's do.
    return join(tokens, weight, n - r, torch.ones_like(to, dtype=torch.float32), to, keep_norm)[0]


def _halves(sizes: Tensor, prefix: int, by_size: bool) -> tuple[Tensor, Tensor]:
    """(B, J) positions of the tokens that may join, and (B, K) of those that they may join; no prefix token in either.

    By turns: even positions join odd ones. By size: the smaller half joins the larger, among equals by turns.
    """
    b, n = sizes.shape
    joining, staying = (
        torch.arange(min(first, n), n, 2, device=sizes.device).expand(b, -1)
        for first in (prefix + prefix % 2, prefix + 1 - prefix % 2)
    )
    if not by_size:
        return joining, staying
    by_turns = torch.cat([joining, staying], dim=1)
    order = sizes.gather(1, by_turns).argsort(dim=1, stable=True)
    ordered = by_turns.gather(1, order)
    half = joining.shape[1]
    return ordered[:, :half].sort(dim=1).values, ordered[:, half:].sort(dim=1).values


def _whole(layout: Layout, r: Callable[[int], float]) -> tuple[int, ...]:
    """Whole numbers, one a block, whose running sum is the rounded running sum of r."""
    done = [0, *(round(total) for total in itertools.accumulate(map(r, range(layout.depth))))]
    return tuple(after - before for before, after in itertools.pairwise(done))
