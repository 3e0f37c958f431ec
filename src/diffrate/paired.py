"""How sure a paired difference is: bootstrap intervals over images, and McNemar's test on what was gained and lost."""

from __future__ import annotations

import math

import torch
from torch import Tensor

RESAMPLES = 2000
CONFIDENCE = 0.95
AT_ONCE = 1 << 24  # image draws held in memory


def bootstrap_intervals(
    differences: Tensor, confidence: float = CONFIDENCE, resamples: int = RESAMPLES, seed: int = 0
) -> list[tuple[float, float]]:
    """For each row of differences (K, images), the interval of its mean when images are drawn anew.

    Every row sees the same draws. Percentiles of the means; the seed makes them repeatable.
    """
    count = differences.shape[1]
    generator = torch.Generator().manual_seed(seed)
    values = differences.double().cpu()
    means = []
    for start in range(0, resamples, chunk := max(1, AT_ONCE // count)):
        drawn = torch.randint(count, (min(chunk, resamples - start), count), generator=generator)
        means.append(torch.stack([row[drawn].mean(dim=1) for row in values]))
    tail = (1 - confidence) / 2
    ends = torch.cat(means, dim=1).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=1)
    return [(low, high) for low, high in ends.T.tolist()]


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided p of McNemar's exact test: could images be gained and lost this unevenly by chance?"""
    changed, fewer = gained + lost, min(gained, lost)
    if changed == 0:
        return 1.0
    logs = [
        math.lgamma(changed + 1) - math.lgamma(k + 1) - math.lgamma(changed - k + 1) - changed * math.log(2)
        for k in range(fewer + 1)
    ]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))
