"""What the operators share: their library, how they are registered, and the shapes of tiles."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

MANY = 32  # images that fill a GPU with programs of 64 tokens

library = torch.library.Library("diffrate", "DEF")


def register(schema: str, function: Any, fake: Any) -> None:
    library.define(schema)
    name = schema.partition("(")[0]

    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"diffrate::{name}", fake, lib=library)


def on_its_device(function: Any) -> Any:
    """Triton launches on the current GPU, wherever the tensors are: make it theirs."""

    @functools.wraps(function)
    def run(first: Tensor, *rest: Any) -> Any:
        if not first.is_cuda or first.device.index == torch.cuda.current_device():
            return function(first, *rest)
        with torch.cuda.device(first.device):
            return function(first, *rest)

    return run


@functools.cache
def has_room(device: torch.device) -> bool:
    """Whether programs may hold much at once: from Ampere on a GPU gives them 100 KB and more, before it 64."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 8


def or_any(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A kernel's argument that it does not look at must still be some tensor."""
    return other if tensor is None else tensor


def rows_dense(t: Tensor) -> Tensor:
    """Kernels step through batch, heads and tokens by strides, and through features one by one."""
    return t if t.stride(-1) == 1 else t.contiguous()


def tiles(length: int, tile: int) -> int:
    return -(-length // tile)


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that holds n; a tile of a product is at least 16 wide."""
    return max(least, 1 << max(n - 1, 0).bit_length())
