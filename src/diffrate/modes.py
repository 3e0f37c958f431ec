"""A model lent to a function comes back as it was: each layer in its own mode, each parameter as learnable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Models in evaluation mode; afterwards each layer is in the mode it was in, also one that has its own."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode that takes no gradients, for as long as it is searched or timed."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        with evaluating(model):
            yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
