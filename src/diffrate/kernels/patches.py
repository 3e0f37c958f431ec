"""Cutting images into patches as one matrix product, where a model does it by a convolution whose windows do not
overlap. For images of three channels cuDNN takes four to ten times as long in half precision.

No model is changed for it: within a PatchProducts, torch hands over its convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

HALF = (torch.float16, torch.bfloat16)
MOST_CHANNELS = 4  # of images; with more of them a convolution has what it needs for tensor cores


class PatchProducts(TorchFunctionMode):
    """Within, convolutions in half precision that cut images into patches run as products."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.conv2d and len(args) > 3 and not kwargs:  # without a stride no patches are cut
            images, weight, bias, *window = args
            images = in_running_type(images)
            if images.dtype in HALF and cuts_patches(images, weight, *window):
                return project(images, weight, bias)
        return func(*args, **(kwargs or {}))


def in_running_type(x: Tensor) -> Tensor:
    """x as a product under the present autocast would take it."""
    kind = x.device.type
    cast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if cast else x


def cuts_patches(
    images: Tensor, weight: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> bool:
    """Whether a convolution's windows lie side by side and cover the images: pictures, not the features of a stem."""
    height, width = weight.shape[-2:]
    return (
        images.dim() == 4
        and images.shape[1] <= MOST_CHANNELS
        and height * width > 1
        and _pair(stride) == (height, width)
        and _pair(padding) == (0, 0)
        and _pair(dilation) == (1, 1)
        and groups == 1
        and images.shape[-2] % height == 0
        and images.shape[-1] % width == 0
    )


def project(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(B, C, rows, columns) what such a convolution makes of images, laid out token by token."""
    b, c, h, w = images.shape
    height, width = weight.shape[-2:]
    rows, columns = h // height, w // width
    patches = images.reshape(b, c, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
    projected = F.linear(patches.reshape(b, rows * columns, c * height * width), weight.flatten(1), bias)
    return projected.transpose(1, 2).unflatten(2, (rows, columns))


def _pair(value: Any) -> Any:
    """What torch takes as one number or as one a dimension; words, such as a padding of "same", are no pair."""
    return (value, value) if isinstance(value, int) else tuple(value)
