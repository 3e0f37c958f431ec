"""Differentiable Discrete Proxy: a learnable number of kept tokens (paper 4.2, eq. 5-7).

Each proxy holds probabilities over candidate counts. Their expectation, rounded up, is the number of tokens kept; the
probability that the token of some rank is kept is a cumulative sum. Both carry straight-through gradients. All blocks
are computed at once, in fp32 whatever autocast says, and nothing leaves the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Kept(NamedTuple):
    """count (L,): image tokens kept, a whole number with a gradient; keep (L, P): probability that rank r is kept."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    keep: Tensor


class DiscreteProxy(nn.Module):
    """One proxy for each of `blocks` blocks over the counts patches, patches - g, …, down to at least 1.

    Counts here are of image tokens: prefix tokens are always kept and are added by the caller.
    """

    def __init__(self, blocks: int, patches: int, granularity: int = 4) -> None:
        super().__init__()
        candidates = torch.arange(patches, 0, -granularity)  # most tokens first
        self.logits = nn.Parameter(torch.zeros(blocks, len(candidates)))
        self.register_buffer("candidates", candidates.float())
        # Rank r is kept by the candidates above r: the first reach[r] of them.
        ranks = torch.arange(patches)
        self.register_buffer("reach", (candidates[None] > ranks[:, None]).sum(dim=1))
        self.candidates: Tensor
        self.reach: Tensor

    def forward(self) -> Kept:
        with torch.autocast(self.logits.device.type, enabled=False):
            probability = self.logits.float().softmax(dim=-1)
            return proxy_of(probability, self.candidates, self.reach)


def proxy_of(probability: Tensor, candidates: Tensor, reach: Tensor) -> Kept:
    """Expected count (eq. 5), rounded up, and the keep probability of each rank (eq. 6), from probabilities (L, K)."""
    expected = probability @ candidates
    # A certain choice must not round up because its probabilities add up to 1 + 1e-7.
    whole = (expected.detach() - 1e-4).ceil()
    cumulative = torch.cat([torch.zeros_like(probability[:, :1]), probability.cumsum(dim=-1)], dim=-1)
    return Kept(expected + (whole - expected.detach()), cumulative[:, reach])


def hard_mask(keep: Tensor, count: Tensor, rank: Tensor) -> Tensor:
    """(B, P) 0/1 mask `rank < count` whose gradient goes to `keep` (P,), the probability of each rank (eq. 7, 10)."""
    soft = keep.expand(rank.shape[0], -1).gather(1, rank)  # indexing would sort in its backward pass
    hard = (rank < count.detach()).to(soft.dtype)
    return hard + (soft - soft.detach())
