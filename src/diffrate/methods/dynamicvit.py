"""DynamicViT: trained predictors drop tokens (Rao et al., "DynamicViT: Efficient Vision Transformers with Dynamic Token
Sparsification", 2021).

Before a quarter, half and three quarters of the depth (blocks 4, 7 and 10 of 12) a small predictor looks at each image
token and at the mean of those that are left, and says with what probability it stays. How it is trained and what is
dropped: selection.py. As in the paper, predictors learn faster than the backbone (at 1e-3, whatever `finetune` gives
the latter); the paper also freezes the backbone in the first five epochs, which is not done here.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from diffrate.backbones.base import Backbone, linear_macs
from diffrate.methods.selection import SelectingModel, Selector, local_and_global, perceptron


class Predictor(Selector):
    """An MLP each for what is local and what is global, half as wide as the tokens; a third one scores the two."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * (dim // 2)), nn.GELU())
        self.score = perceptron(2 * (dim // 2), dim // 2, max(dim // 4, 1), 2)
        self.macs = linear_macs(self)

    def forward(self, x: Tensor, alive: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return self.score(local_and_global(self.embed(x), alive)).to(wide).log_softmax(dim=-1)


class DynamicViT(SelectingModel):
    name: ClassVar[str] = "dynamicvit"

    @classmethod
    def new_selector(cls, backbone: Backbone) -> Selector:
        return Predictor(backbone.layout.dim)
