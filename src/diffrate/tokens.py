"""What flows through the blocks: the tokens of a batch, how many patches each stands for, and which ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Positions:
    """Where tokens sit, for models whose attention looks at it (rotary embeddings, for one).

    table  the model's own values for this input, by patch; only the model's adapter looks inside.
    index  (B, N) whose place each token has: that of input token index[b, n]. A merged token keeps its target's.
           None while every token is where it began.
    """

    table: Tensor
    index: Tensor | None = None

    def taken(self, chosen: Tensor) -> Positions:
        """For the tokens `chosen` (B, K), in that order."""
        return replace(self, index=chosen if self.index is None else self.index.gather(1, chosen))

    def rows(self, chosen: slice | Tensor) -> Positions:
        return self if self.index is None else replace(self, index=self.index[chosen])

    def indices(self, batch: int, count: int) -> Tensor:
        """(B, N) the index, spelled out where every token is still where it began."""
        if self.index is not None:
            return self.index
        return torch.arange(count, device=self.table.device).expand(batch, -1)


@dataclass(frozen=True)
class Tokens:
    """One batch of token sequences between two steps of the walk.

    x        (B, N, C) features, prefix tokens first.
    prefix   how many leading tokens (class, distillation, registers) are never removed or merged into.
    size     (B, N) patches a token stands for, or None while every token still stands for itself alone.
    log_size  (B, N) its logarithm, where whoever made the size made that as well.
    normed   (B, N, C) what the norm that comes next makes of x, where whoever made x made that as well.
    length   (B, N) how long its features are, where whoever made x measured that as well.
    importance  (B, N) what a token's was where it was last asked for, that of its members together; None for operators
             without a memory.
    patches  (B, P) for each input patch the index of its token in the sequence, or None when nobody asked.
             A pruned patch holds ~t (negative): it has no token, and t is the one that stands in for it when
             the grid is restored.
    positions  where each token sits, or None for models that ask only while they embed.
    grid     (rows, columns) of the input's patches, where it is known.
    """

    x: Tensor
    prefix: int
    size: Tensor | None = None
    patches: Tensor | None = None
    positions: Positions | None = None
    grid: tuple[int, int] | None = None
    log_size: Tensor | None = None
    normed: Tensor | None = None
    length: Tensor | None = None
    importance: Tensor | None = None

    @property
    def count(self) -> int:
        return self.x.shape[1]

    def with_features(self, x: Tensor) -> Tokens:
        return replace(self, x=x, normed=None, length=None)

    def sizes(self) -> Tensor:
        """(B, N) sizes, ones where nothing was merged yet."""
        if self.size is not None:
            return self.size
        return torch.ones(self.x.shape[:2], dtype=torch.float32, device=self.x.device)

    def key_bias(self) -> Tensor | None:
        """(B, N) log(size) to add to the attention logits of each key (proportional attention), or None."""
        if self.size is None:
            return None
        known = self.log_size is not None and self.log_size.shape == self.size.shape
        return self.log_size if known else self.size.log()


def rows(tokens: Tokens, chosen: slice | Tensor) -> Tokens:
    """A part of the batch."""
    return replace(
        tokens,
        x=tokens.x[chosen],
        size=None if tokens.size is None else tokens.size[chosen],
        patches=None if tokens.patches is None else tokens.patches[chosen],
        positions=None if tokens.positions is None else tokens.positions.rows(chosen),
        log_size=None if tokens.log_size is None else tokens.log_size[chosen],
        normed=None if tokens.normed is None else tokens.normed[chosen],
        length=None if tokens.length is None else tokens.length[chosen],
        importance=None if tokens.importance is None else tokens.importance[chosen],
    )


def stacked(parts: Sequence[Tokens]) -> Tokens:
    """Batches of equally many tokens as one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    size = patches = importance = None
    if any(part.size is not None for part in parts):
        size = torch.cat([part.sizes() for part in parts])
    if all(part.patches is not None for part in parts):
        patches = torch.cat([part.patches for part in parts if part.patches is not None])
    if all(part.importance is not None for part in parts):
        importance = torch.cat([part.importance for part in parts if part.importance is not None])
    positions = first.positions
    if positions is not None:
        places = [part.positions.indices(part.x.shape[0], part.count) for part in parts if part.positions]
        positions = replace(positions, index=torch.cat(places))
    features = first.with_features(torch.cat([part.x for part in parts]))
    return replace(
        features, size=size, patches=patches, positions=positions, log_size=None, importance=importance
    )


def start(
    x: Tensor,
    prefix: int,
    track: bool,
    positions: Positions | None = None,
    grid: tuple[int, int] | None = None,
) -> Tokens:
    """The tokens as they leave the embedding: patch p is token prefix + p."""
    patches = None
    if track:
        patches = torch.arange(prefix, x.shape[1], device=x.device).expand(x.shape[0], -1)
    return Tokens(x, prefix, None, patches, positions, grid)
