"""A model's layers as matrix products, which accelerators need beside their MACs: shapes, or why there are none."""

from __future__ import annotations

import math
from typing import NoReturn

from torch import nn

from diffrate.backbones.base import Backbone
from diffrate.errors import UnsupportedModelError


def linear_shapes(*modules: nn.Module) -> tuple[tuple[int, int], ...]:
    """(in, out) of every linear layer inside the modules."""
    layers = [m for module in modules for m in module.modules() if isinstance(m, nn.Linear)]
    return tuple((m.in_features, m.out_features) for m in layers)


def edge_products(
    backbone: Backbone, embedding: nn.Module, head: tuple[tuple[int, int], ...]
) -> list[tuple[int, int, int]]:
    """(rows, in, out) of an embedding that is one convolution, a product of patches and its kernels, and of a head."""
    convolutions = [m for m in embedding.modules() if isinstance(m, nn.Conv2d)]
    if len(convolutions) != 1 or linear_shapes(embedding):
        refuse(backbone.model, "its embedding is more than one matrix product")
    if backbone.head_macs()[1]:
        refuse(backbone.model, "its head attends to every token, which is more than a product")
    pixels = convolutions[0].in_channels * math.prod(convolutions[0].kernel_size)
    patches = backbone.layout.tokens - backbone.layout.prefix
    return [(patches, pixels, convolutions[0].out_channels), *((1, i, o) for i, o in head)]


def refuse(model: nn.Module, reason: str) -> NoReturn:
    raise UnsupportedModelError(f"{type(model).__name__} has no hardware costs, only MACs: {reason}")
