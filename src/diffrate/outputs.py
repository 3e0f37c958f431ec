"""The one tensor that matters in what a model returns: libraries wrap their logits in tuples and dataclasses."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from diffrate.errors import DiffRateError

FIELDS = ("logits", "image_embeds", "pooler_output")  # of transformers' outputs, best first


def main_output(output: Any) -> Tensor:
    """Logits, of the first head where there are two; the embedding of a model that has no classifier."""
    if isinstance(output, tuple):
        output = output[0]
    for name in FIELDS:
        if not isinstance(output, Tensor) and getattr(output, name, None) is not None:
            output = getattr(output, name)
    if not isinstance(output, Tensor):
        raise DiffRateError(f"the model returns a {type(output).__name__} without logits or an embedding")
    return output


def class_count(model: nn.Module) -> int:
    """How many classes a classifier tells apart, in timm's words or in those of transformers; 0 where nobody says."""
    for name in ("num_classes", "num_labels"):
        count = getattr(model, name, None)
        if isinstance(count, int):
            return count
    return 0
