"""Isotonic regression: the nearest sequence that never rises, or never falls."""

from __future__ import annotations

import torch
from torch import Tensor


def monotone(values: Tensor, weight: Tensor) -> Tensor:
    """The nearest (L,) values that never rise: pool neighbours that do, at their weighted mean."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, w in zip(values.tolist(), weight.tolist(), strict=True):
        mean, length = value, 1
        while pools and pools[-1][0] < mean:
            before, before_weight, before_length = pools.pop()
            mean = (mean * w + before * before_weight) / (w + before_weight)
            w, length = w + before_weight, length + before_length
        pools.append((mean, w, length))
    return torch.tensor([mean for mean, _, length in pools for _ in range(length)], dtype=torch.float64)


def rising(values: Tensor) -> Tensor:
    """The nearest (L,) values that never fall."""
    return -monotone(-values, torch.ones_like(values))
