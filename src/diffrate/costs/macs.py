"""Multiply-accumulates of a compressed model from its real layer shapes (paper, Algorithm 2).

Papers call one MAC one FLOP; torch.utils.flop_counter counts two. Matching and ranking are left out, as in the
paper: together they stay below one percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from diffrate.backbones import Backbone, backbone_of
from diffrate.costs.base import CostModel, attention_counts
from diffrate.modes import evaluating
from diffrate.schedule import Schedule

GIGA = 1e9


@dataclass(frozen=True)
class MacCost(CostModel):
    """The MACs of one model as a function of the tokens in each block; differentiable in real-valued counts.

    fixed            embedding and classifier, or decoder.
    attention_token  (L,) per token in attention; attention_pair (L,) per pair of tokens; mlp_token (L,) per token in
                     the MLP; head_token per token that reaches the head.
    """

    tokens: int
    fixed: float
    attention_token: Tensor
    attention_pair: Tensor
    mlp_token: Tensor
    head_token: float

    @property
    def depth(self) -> int:
        return len(self.mlp_token)

    @classmethod
    def of(cls, model: nn.Module) -> MacCost:
        return cls.of_backbone(backbone_of(model))

    @classmethod
    def of_backbone(cls, backbone: Backbone, behind: float = 0.0) -> MacCost:
        """The MACs of a backbone, and of what lies `behind` it and costs the same under every schedule."""
        parts = [backbone.block_macs(i) for i in range(backbone.layout.depth)]
        attention_token, attention_pair, mlp_token = torch.tensor(parts, dtype=torch.float64).unbind(1)
        head_fixed, head_token = backbone.head_macs()
        fixed = _embedding_macs(backbone) + head_fixed + behind
        return cls(backbone.layout.tokens, fixed, attention_token, attention_pair, mlp_token, head_token)

    def gmacs(
        self, kept: Tensor | Sequence[float], attended: Tensor | Sequence[float] | None = None
    ) -> Tensor:
        """GMACs when block l hands `kept[..., l]` tokens to its MLP; leading dimensions are a batch of schedules.

        attended  tokens in the attention of each block, where that is not what the block before handed on.
        """
        mlp = torch.as_tensor(kept, dtype=torch.float64)
        if attended is None:
            attention = attention_counts(mlp, self.tokens)
        else:
            attention = torch.as_tensor(attended, dtype=torch.float64)
        device = mlp.device
        per_block = (
            attention * self.attention_token.to(device)
            + attention.square() * self.attention_pair.to(device)
            + mlp * self.mlp_token.to(device)
        )
        return (per_block.sum(dim=-1) + self.fixed + self.head_token * mlp[..., -1]) / GIGA

    def price(self, kept: Tensor) -> dict[str, Tensor]:
        return {"gmacs": self.gmacs(kept)}

    def of_schedule(self, schedule: Schedule | None) -> float:
        return self.price_of(schedule)["gmacs"]


def gmacs(model: nn.Module, schedule: Schedule | None = None) -> float:
    """GMACs of one image through a model, whole or under a schedule."""
    from diffrate.compressed import CompressedModel, checked

    if isinstance(model, CompressedModel):
        if schedule is None:
            spent = MacCost.of_backbone(model.backbone).gmacs(model.kept, model.attended)
            return float(spent) + model.added_gmacs
        model = model.original
    backbone = backbone_of(model)
    if schedule is not None:
        schedule = checked(schedule, backbone.layout)
    return MacCost.of_backbone(backbone).of_schedule(schedule)


def _embedding_macs(backbone: Backbone) -> float:
    """MACs from pixels to tokens, counted on one blank image because stems differ between models."""
    layout, model = backbone.layout, backbone.model
    parameter = next(model.parameters())
    image = torch.zeros(1, layout.in_chans, *layout.img_size, dtype=parameter.dtype, device=parameter.device)
    counter = FlopCounterMode(display=False)
    with (
        evaluating(model),
        torch.no_grad(),
        counter,
    ):  # a stem's batch norm must not learn from the blank image
        backbone.embed(image)
    return float(counter.get_total_flops()) / 2
