"""The cost interface: what a number of tokens in every block costs, in named metrics.

MACs, a measured table and Gemmini are three cost models. A search takes any of them, or several as one (`Costs`), and
only asks for `price`: differentiable in real-valued counts, for one schedule or a batch of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffrate.errors import DiffRateError
from diffrate.schedule import Schedule


class Metric(NamedTuple):
    """How a metric is written in a budget, and in words."""

    unit: str
    words: str


METRICS = {
    "gmacs": Metric("G", "GMACs"),
    "latency_ms": Metric("ms", "ms"),
    "power_at_rate_mw": Metric("mW", "mW"),
    "energy_mj": Metric("mJ", "mJ"),
}


class CostModel(ABC):
    """What block l costs with n_attention tokens in its attention and kept[l] in its MLP, summed over a model.

    tokens, depth  tokens that the first block receives, and blocks.
    """

    tokens: int
    charges_removal: bool = (
        False  # whether a block that removes tokens costs more for it, however few they are
    )

    @property
    @abstractmethod
    def depth(self) -> int: ...

    @abstractmethod
    def price(self, kept: Tensor) -> dict[str, Tensor]:
        """Each metric (...) when block l hands `kept[..., l]` tokens to its MLP; leading dimensions are schedules."""

    def describe(self) -> dict[str, Any]:
        """What the costs depend on, as plain values: a search that is resumed must find the same."""
        return {}

    def price_of(self, schedule: Schedule | None) -> dict[str, float]:
        """Each metric of a schedule, or of the whole model."""
        return self.price_of_kept(
            [self.tokens] * self.depth if schedule is None else schedule.effective.merge
        )

    def price_of_kept(self, kept: Sequence[int]) -> dict[str, float]:
        """Each metric when block l keeps kept[l] tokens."""
        prices = self.price(torch.tensor(kept, dtype=torch.float64))
        return {metric: float(price) for metric, price in prices.items()}


class Costs(CostModel):
    """Several cost models of one network as one."""

    def __init__(self, models: Sequence[CostModel]) -> None:
        self.models, self.tokens = models, models[0].tokens
        self.charges_removal = any(model.charges_removal for model in models)
        known: set[str] = set()
        for model in models:
            if (model.tokens, model.depth) != (self.tokens, self.depth):
                raise DiffRateError(
                    f"a cost model is for {model.depth} blocks and {model.tokens} tokens, and the network has "
                    f"{self.depth} and {self.tokens}"
                )
            own = set(model.price_of(None))
            if known & own:
                metric = METRICS[min(known & own)]
                raise DiffRateError(
                    f"{metric.words} would come from two cost models at once: give one of them"
                )
            known |= own

    @property
    def depth(self) -> int:
        return self.models[0].depth

    def price(self, kept: Tensor) -> dict[str, Tensor]:
        prices: dict[str, Tensor] = {}
        for model in self.models:
            prices.update(model.price(kept))
        return prices


def attention_counts(kept: Tensor, tokens: int) -> Tensor:
    """(..., L) tokens in each block's attention: what the block before handed on."""
    return torch.cat([torch.full_like(kept[..., :1], tokens), kept[..., :-1]], dim=-1)


class Interpolated(torch.autograd.Function):
    """A table (T,) read at real-valued places between its entries, with another table's slope as its gradient."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, at: Tensor, values: Tensor, slopes: Tensor
    ) -> Tensor:
        below = at.detach().floor().clamp(0, len(values) - 2).long()
        ctx.save_for_backward(slopes[below])
        return values[below] + (values[below + 1] - values[below]) * (at - below)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0] * slope, None, None


def read(at: Tensor, values: Tensor, slopes: Tensor | None = None) -> Tensor:
    """`values` (T,), the costs of 0, 1, … tokens, at real-valued counts; exact at whole ones.

    slopes  (T - 1,) what a gradient sees between two entries; without them, the difference of the entries.
    """
    if not at.requires_grad:  # most calls only ask for the price
        values = values.to(at.device)
        below = at.floor().clamp(0, len(values) - 2).long()
        return torch.lerp(values[below], values[below + 1], at - below)
    slopes = mean_slopes(values) if slopes is None else slopes
    out: Tensor = Interpolated.apply(at, values.to(at.device), slopes.to(at.device))
    return out


def mean_slopes(values: Tensor, window: int = 1) -> Tensor:
    """(T - 1,) slopes of a table, each the mean over `window` entries around.

    Hardware works in whole arrays or tiles of tokens, so that the slope at one count alone is often zero.
    """
    place = torch.arange(len(values) - 1)
    low = (place - (window - 1) // 2).clamp_min(0)
    high = (place + 1 + window // 2).clamp_max(len(values) - 1)
    return (values[high] - values[low]) / (high - low)
