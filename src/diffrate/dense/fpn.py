"""Semantic FPN (Kirillov et al., 2019): feature maps of four resolutions, summed up into one map of logits.

`Scales` makes four resolutions out of a plain ViT, whose maps are all of one; a CAFormer has them already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = 16  # of the group norms


class Scales(nn.Module):
    """Four maps of a ViT, at stride 16, to strides 4, 8, 16 and 32."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def double(channels: int) -> nn.Module:
            return nn.ConvTranspose2d(channels, channels, kernel_size=2, stride=2)

        self.scales = nn.ModuleList(
            [
                nn.Sequential(double(width), nn.GroupNorm(1, width), nn.GELU(), double(width)),
                double(width),
                nn.Identity(),
                nn.MaxPool2d(kernel_size=2, stride=2, ceil_mode=True),
            ]
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        return [scale(x) for scale, x in zip(self.scales, maps, strict=True)]


class SemanticFPN(nn.Module):
    """Maps (B, C_i, H_i, W_i), finest first, to logits (B, classes, H_0, W_0)."""

    def __init__(self, channels: Sequence[int], classes: int, width: int = 128, dropout: float = 0.1) -> None:
        super().__init__()
        self.lateral = nn.ModuleList([nn.Conv2d(c, width, kernel_size=1) for c in channels])
        # Level i is convolved and doubled i times until it has the finest resolution; the finest is convolved once.
        self.steps = nn.ModuleList([nn.Sequential(*_steps(width, max(i, 1))) for i in range(len(channels))])
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = nn.Conv2d(width, classes, kernel_size=1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        levels = [lateral(x) for lateral, x in zip(self.lateral, maps, strict=True)]
        for i in reversed(range(len(levels) - 1)):  # top down
            levels[i] = levels[i] + _resized(levels[i + 1], levels[i])
        finest = levels[0]
        total = self.steps[0](finest)
        for i, level in enumerate(levels[1:], start=1):
            x = level
            for step, below in zip(self.steps[i].children(), reversed(levels[:i]), strict=True):
                x = _resized(step(x), below)
            total = total + x
        logits: Tensor = self.classifier(self.dropout(total))
        return logits


def _steps(width: int, count: int) -> list[nn.Module]:
    """Convolution, norm and activation, `count` times."""
    return [
        nn.Sequential(
            nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False),
            nn.GroupNorm(GROUPS, width),
            nn.ReLU(),
        )
        for _ in range(count)
    ]


def _resized(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=False)
