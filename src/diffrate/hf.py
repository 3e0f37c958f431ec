"""Compressed models of Hugging Face transformers: called as the library calls its own, with the library's outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffrate.backbones.hf_vit import HfViT
from diffrate.compressed import CompressedModel
from diffrate.errors import DiffRateError


class CompressedTower(CompressedModel):
    """A vision model of transformers under a schedule.

    The output is of the class that the original returns. Its last_hidden_state and hidden_states hold the tokens that
    are left; which patches each of them stands for, and how many, comes with return_tokens, from forward_tokens and,
    block by block, from trace.
    """

    backbone: HfViT

    def forward(  # type: ignore[override]  # the library's own names
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        return_tokens: bool = False,
        **others: Any,
    ) -> Any:
        """The library's output; with return_tokens also the final Tokens: features, sizes and the patch map."""
        self._refuse_what_is_not_supported(pixel_values, labels, interpolate_pos_encoding, others)
        config = self.config
        if output_hidden_states is None:
            output_hidden_states = bool(getattr(config, "output_hidden_states", False))
        first, walked = self._start(pixel_values, return_tokens), range(self.backbone.layout.depth)
        tokens, left = self._walk_from(first, walked if output_hidden_states else ())
        tokens = tokens.with_features(self.backbone.norm(tokens.x))
        more: dict[str, Any] = {}
        if output_hidden_states:
            more["hidden_states"] = (first.x, *(each.x for each in left))
        output = self.backbone.head_parts.made(self.original, tokens, labels, **more)
        if not (getattr(config, "return_dict", True) if return_dict is None else return_dict):
            output = output.to_tuple()
        return (output, tokens) if return_tokens else output

    def _refuse_what_is_not_supported(
        self, pixel_values: Tensor, labels: Tensor | None, interpolate: bool | None, others: dict[str, Any]
    ) -> None:
        given = [name for name, value in others.items() if value is not None and value is not False]
        if labels is not None and "ForImageClassification" not in type(self.original).__name__:
            given.append("labels")
        if given:
            raise DiffRateError(f"a compressed model does not take {', '.join(sorted(given))}")
        size = tuple(pixel_values.shape[-2:])
        if not (interpolate or self.backbone.parts.resizes or size == self.backbone.layout.img_size):
            height, width = self.backbone.layout.img_size
            raise DiffRateError(
                f"the images are {size[0]}x{size[1]} and the model is for {height}x{width}: pass "
                "interpolate_pos_encoding=True, or resize them"
            )

    @property
    def config(self) -> Any:
        return self.original.config

    @property
    def device(self) -> torch.device:
        return next(self.original.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.original.parameters()).dtype
