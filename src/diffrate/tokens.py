"""What flows through the blocks: the tokens of a batch, how many patches each stands for, and which ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """One batch of token sequences between two steps of the walk.

    x        (B, N, C) features, prefix tokens first.
    prefix   how many leading tokens (class, distillation, registers) are never removed or merged into.
    size     (B, N) patches a token stands for, or None while every token still stands for itself alone.
    patches  (B, P) for each input patch the index of its token in the sequence, or None when nobody asked.
             A pruned patch holds ~t (negative): it has no token, and t is the one that stands in for it when
             the grid is restored.
    """

    x: Tensor
    prefix: int
    size: Tensor | None = None
    patches: Tensor | None = None

    @property
    def count(self) -> int:
        return self.x.shape[1]

    def with_features(self, x: Tensor) -> Tokens:
        return replace(self, x=x)

    def sizes(self) -> Tensor:
        """(B, N) sizes, ones where nothing was merged yet."""
        if self.size is not None:
            return self.size
        return torch.ones(self.x.shape[:2], dtype=torch.float32, device=self.x.device)

    def key_bias(self) -> Tensor | None:
        """(B, N) log(size) to add to the attention logits of each key (proportional attention), or None."""
        return None if self.size is None else self.size.log()


def start(x: Tensor, prefix: int, track: bool) -> Tokens:
    """The tokens as they leave the embedding: patch p is token prefix + p."""
    patches = None
    if track:
        patches = torch.arange(prefix, x.shape[1], device=x.device).expand(x.shape[0], -1)
    return Tokens(x, prefix, None, patches)
