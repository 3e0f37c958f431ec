"""The three questions a backbone answers: layout, attention access, position state.

An adapter holds a reference to the user's model and calls the model's own layers; it computes no ranking, no
reduction and no attention itself, so that the walk, the fast kernels and the search share one set of adapters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from diffrate.tokens import Positions, Tokens, start


@dataclass(frozen=True)
class Layout:
    """What a sequence looks like in this model.

    depth, dim      blocks and width.
    tokens, prefix  sequence length at the model's own input size, and how many leading tokens are protected.
    class_token     whether token 0 is a class token whose attention can rank the others.
    mean_pooled     whether the head looks at image tokens, so that their sizes matter to it.
    plain_mean      whether it does so by their mean alone, and not by a maximum or by attention.
    img_size        (height, width) of the model's own input; in_chans its channels.
    dynamic         whether other input sizes are accepted.
    restores        whether the whole grid is restored behind the blocks, so that the patch map is always needed.
    """

    depth: int
    dim: int
    tokens: int
    prefix: int
    class_token: bool
    mean_pooled: bool
    plain_mean: bool
    img_size: tuple[int, int]
    in_chans: int
    dynamic: bool
    restores: bool = False

    @property
    def compresses_last_block(self) -> bool:
        """Whether a search lets the last block drop tokens: only where the head looks at the class token alone."""
        return self.class_token and not self.mean_pooled


class Attention(NamedTuple):
    """One block's attention, opened up: q, k, v (B, heads, N, d), the logit scale and the dropout in force.

    bias  (B or 1, heads, N, N) what the model adds to the logits of each pair of tokens, or None.
    by    what mixes the values where it is not torch's own attention: takes this object and an additive mask that
          broadcasts to (B, heads, N, N), or None, and returns (B, heads, N, d).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    dropout: float
    bias: Tensor | None = None
    by: Callable[[Attention, Tensor | None], Tensor] | None = None

    def logit_bias(self, key_bias: Tensor | None) -> Tensor | None:
        """The model's own bias and that of keys (B, N) together: (B, N) where there is only the latter."""
        if self.bias is None:
            return key_bias
        return self.bias if key_bias is None else self.bias + key_bias[:, None, None].to(self.bias.dtype)


class BlockMacs(NamedTuple):
    """Multiply-accumulates of one block: per token in attention, per pair of tokens, per token in the MLP."""

    attention_token: float
    attention_pair: float
    mlp_token: float


class BlockProducts(NamedTuple):
    """Matrix products of one block: linear layers (in, out) on the tokens in attention and in the MLP, and heads."""

    attention: tuple[tuple[int, int], ...]
    heads: int
    head_dim: int
    mlp: tuple[tuple[int, int], ...]


def linear_macs(module: nn.Module) -> float:
    """MACs per token of every linear layer inside a module."""
    return float(sum(m.in_features * m.out_features for m in module.modules() if isinstance(m, nn.Linear)))


class Backbone(ABC):
    """One model, seen through the three questions. `accepts` is cheap; the constructor refuses what does not fit."""

    describes: ClassVar[str]  # in a sentence
    library: ClassVar[str] = "timm"
    families: ClassVar[dict[str, str]]  # what people call the models, with a name that load_model takes
    compresses: ClassVar[str] = "all blocks"
    model: nn.Module
    layout: Layout

    @classmethod
    @abstractmethod
    def accepts(cls, model: nn.Module) -> bool: ...

    @abstractmethod
    def __init__(self, model: nn.Module) -> None: ...

    @abstractmethod
    def grid(self, images: Tensor) -> tuple[int, int]:
        """(rows, columns) of patches for this batch."""

    @abstractmethod
    def embed(self, images: Tensor) -> Tensor:
        """Images to (B, N, C) tokens with positions, as they enter the first block."""

    def positions(self, images: Tensor) -> Positions | None:
        """What blocks look up about where tokens sit; None where positions enter with the embedding alone."""
        return None

    def start(self, images: Tensor, track: bool = False) -> Tokens:
        """The tokens of a batch as they enter the first block; with `track` they remember their patches."""
        return self.start_with(self.embed(images), images, track)

    def start_with(self, x: Tensor, images: Tensor, track: bool = False) -> Tokens:
        """The same from the embedding `x` of these images."""
        track = track or self.layout.restores
        return start(x, self.layout.prefix, track, self.positions(images), self.grid(images))

    def runs_whole(self, positions: Positions | None) -> bool:
        """Whether `block` can run tokens that sit there: not where it looks positions up by itself."""
        return True

    @abstractmethod
    def block(self, i: int, x: Tensor, positions: Positions | None = None) -> Tensor:
        """Block i as the model itself runs it."""

    @abstractmethod
    def open_attention(self, i: int, x: Tensor, positions: Positions | None = None) -> Attention:
        """Norm and projections of block i, queries and keys turned to their positions."""

    @abstractmethod
    def close_attention(self, i: int, x: Tensor, mixed: Tensor) -> Tensor:
        """Output projection, scaling and residual: x + attention, from the mixed values (B, heads, N, d)."""

    @abstractmethod
    def mlp(self, i: int, x: Tensor) -> Tensor:
        """x + MLP of block i."""

    def norms(self, i: int) -> tuple[nn.LayerNorm, nn.LayerNorm] | None:
        """The layer norms that attention and MLP of block i begin with, where what comes before may compute them.

        Then open_attention_of, attention_update and mlp_update say how the halves go on from there.
        """
        return None

    def open_attention_of(self, i: int, normed: Tensor) -> Attention:
        """open_attention, where `normed` is what the first of norms(i) makes of x."""
        raise NotImplementedError(f"{type(self).__name__} has no norms")

    def attention_update(self, i: int, x: Tensor, mixed: Tensor) -> Tensor:
        """What close_attention adds to x."""
        raise NotImplementedError(f"{type(self).__name__} has no norms")

    def mlp_update(self, i: int, normed: Tensor) -> Tensor:
        """What the MLP of block i adds to x, where `normed` is what the second of norms(i) makes of it."""
        raise NotImplementedError(f"{type(self).__name__} has no norms")

    @abstractmethod
    def norm(self, x: Tensor) -> Tensor:
        """The norm after the last block."""

    @abstractmethod
    def head(self, tokens: Tokens, pre_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Pool normed tokens and classify, weighting by size where the head averages."""

    def features(self, tokens: Tokens) -> Tensor:
        """What the model's forward_features would return, from the normed tokens of the last block."""
        return tokens.x

    @abstractmethod
    def block_macs(self, i: int) -> BlockMacs: ...

    @abstractmethod
    def head_macs(self) -> tuple[float, float]:
        """MACs of the head: fixed, and per token where it looks at every token."""

    @abstractmethod
    def block_products(self, i: int) -> BlockProducts:
        """The shapes of block i's matrix products, which accelerators need beside their MACs."""

    @abstractmethod
    def edge_products(self) -> list[tuple[int, int, int]]:
        """(rows, in, out) of the matrix products before and after the blocks."""
