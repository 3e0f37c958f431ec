"""The fast twins of ranking and reduction, and the one place that picks them.

A block takes the fast path (`fast`) on a CUDA device with Triton, when nobody asks for the map from patch to token, and
for the operators that the kernels know: class attention, pruning before merging, and merging by cost where nothing is
pruned. In training the reduction also notes where each token went, which is its gradient. All else runs as plain
PyTorch, `ranking` and `reduction`, which are what the kernels are tested against.

Attention of many images is torch's (`mixing`), with the sizes of tokens as a bias: a kernel of our own was slower. For
few (`FEW_HEADS`) it is ours, which fills the GPU with smaller tiles and hands out the class token's logits on the way;
there, too, ranking runs beside the output projection where a CUDA graph is being captured. In training in half
precision it is ours for few tokens with sizes (`_trains_at_once`): one program has all keys of a head, so that the
gradient is one kernel. Images are cut into patches by a product (`embedding`). `using` changes the choice, to measure
it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from diffrate.backbones.base import Attention
from diffrate.errors import DiffRateError
from diffrate.kernels import ops
from diffrate.kernels.operators import has_room
from diffrate.kernels.patches import PatchProducts
from diffrate.mixing import mix
from diffrate.operator import Operator
from diffrate.ranking import QUERIES
from diffrate.steps import step
from diffrate.tokens import Tokens

PATHS = ("auto", "plain")
MOST_TOKENS = 1024  # of one image, which one program ranks
FEW_HEADS = 64  # images x heads up to which attention runs as a kernel of our own
FEW_IMAGES = 4  # up to which blocks that remove nothing run as kernels, whatever their norms are
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED = False  # tests: run the kernels on the CPU, in Triton's interpreter

_available = importlib.util.find_spec("triton") is not None
_path = "auto"


@contextmanager
def using(path: str) -> Iterator[None]:
    """Within: "auto" picks for itself; "plain" avoids every kernel."""
    global _path
    if path not in PATHS:
        raise DiffRateError(f"the path must be one of {', '.join(PATHS)}, not {path!r}")
    before, _path = _path, path
    try:
        yield
    finally:
        _path = before


def fast(tokens: Tokens, operator: Operator) -> bool:
    """Whether the kernels can run this block."""
    x = tokens.x
    return (
        _available
        and _path != "plain"
        and (x.is_cuda or INTERPRETED)
        and x.dtype in DTYPES
        and tokens.patches is None
        and tokens.positions is None
        and tokens.count <= MOST_TOKENS
        and operator.importance == "class-attention"
        and operator.operation != "merge-prune"
        and not (operator.pruned_mass or operator.size_aware)
        and (operator.choice == "rank" or (operator.operation == "merge" and not _plain_is_faster(x)))
    )


def _plain_is_faster(x: Tensor) -> bool:
    """Whether torch multiplies all pairs of tokens faster: in fp32 of few images."""
    if x.dtype != torch.float32 or _learns(x) or INTERPRETED:
        return False
    return len(x) <= (1 if torch.compiler.is_compiling() else FEW_IMAGES)  # as in `few`


def embedding(images: Tensor) -> AbstractContextManager[Any]:
    """Within, a model's own embedding runs in the faster way that this device has."""
    return PatchProducts() if _path != "plain" and (images.is_cuda or INTERPRETED) else nullcontext()


class Ranked(NamedTuple):
    """(B, N) importance of all tokens and (B, N) their numbers in its order, on the stream where they are made."""

    importance: Tensor
    order: Tensor
    stream: torch.cuda.Stream | None = None

    def rows(self, chosen: slice | Tensor) -> Ranked:
        """A part of the batch."""
        return self._replace(importance=self.importance[chosen], order=self.order[chosen])


def attend(attention: Attention, size: Tensor | None, key_bias: Tensor | None) -> Tensor:
    """(B, heads, N, d) values mixed by attention.

    size, key_bias  (B, N) how much each key counts, and its logarithm; None where all count once.
    """
    if _attends(attention):
        mixed: Tensor = _ops().attend(*attention[:3], size, attention.scale, False)[0]
        return mixed
    if size is not None and _trains_at_once(attention):
        return _attend_training(attention, size, False)[0]
    return mix(attention, key_bias)


def _attend_training(attention: Attention, size: Tensor, row: bool) -> tuple[Tensor, Tensor]:
    """Values mixed with sizes in force, with a gradient; and the class token's logits, which have none."""
    given = (*attention[:3], size, attention.scale, row)
    if not torch.compiler.is_compiling():
        mixed, logits = TrainingAttention.apply(*given)
        return mixed, logits
    mixed, logits, _ = torch.ops.diffrate.attend_training(*given)
    return mixed, logits.detach()


def attend_and_score(
    attention: Attention, size: Tensor | None, key_bias: Tensor | None, prefix: int, operator: Operator
) -> tuple[Tensor, Tensor]:
    """The same, and (B, heads, R, N) logits in base 2 of the R queries that rank: the class token's comes first."""
    q, k, v, scale = attention[:4]
    call = _ops()
    if _attends(attention) and not operator.image_share:
        mixed, logits = call.attend(q, k, v, size, scale, True)
        return mixed, logits
    if size is not None and not operator.image_share and _trains_at_once(attention):
        return _attend_training(attention, size, True)
    mixed = attend(attention, size, key_bias)
    q, k = q.detach(), k.detach()  # a choice of tokens has no gradient
    with step("ranking"):
        return mixed, call.query_logits(q, k, size, scale, prefix, QUERIES if operator.image_share else 0)


def _attends(attention: Attention) -> bool:
    """Whether attention is ours."""
    assert attention.bias is None  # models with a bias of every pair have positions, and run plain
    ours = attention.by is None and attention.dropout == 0
    return ours and few(attention.q) and not _trains(attention)


def _trains_at_once(attention: Attention) -> bool:
    """Whether attention in training is ours: of heads and tokens that one program can hold."""
    q, k = attention[:2]
    ours = attention.by is None and attention.dropout == 0 and _trains(attention) and q.shape == k.shape
    fits = q.shape[-2] <= ops.MOST_KEYS and q.shape[-1] <= 64
    return ours and fits and (INTERPRETED or (q.element_size() == 2 and _has_room()))


@torch.compiler.assume_constant_result
def _has_room() -> bool:
    """Whether programs may hold all keys of a head, on a GPU that then multiplies bf16 too."""
    return has_room(torch.device("cuda"))


def _trains(attention: Attention) -> bool:
    """Whether queries, keys or values want a gradient: adapters may train some of them alone."""
    return any(_learns(t) for t in attention[:3])


def _learns(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def few(q: Tensor) -> bool:
    """Whether so few images come that a GPU waits for kernels to begin, more than for them to end."""
    if torch.compiler.is_compiling():  # a compiled batch size other than 1 may stand for any
        return q.shape[0] == 1
    return q.shape[0] * q.shape[1] <= FEW_HEADS


def lean(tokens: Tokens, norms: tuple[nn.LayerNorm, nn.LayerNorm] | None) -> bool:
    """Whether a block that removes nothing is worth running in fewer kernels than the model's own has.

    It is where sums and norms can be one, and where so few images come that a GPU waits for kernels to begin.
    """
    if torch.compiler.is_compiling() or _learns(tokens.x):
        return False
    fused = norms is not None and all(_can_norm(norm, tokens.x) for norm in norms)
    return fused or len(tokens.x) <= FEW_IMAGES


def rank(logits: Tensor, prefix: int, operator: Operator, previous: Tensor | None = None) -> Ranked:
    """Importance and order of the tokens, from the logits of the queries that rank and their `previous` importance."""
    given = (logits, prefix, operator.image_share, previous if operator.memory else None, operator.memory)
    with step("ranking"):
        if not _beside(logits):
            importance, order = _ops().rank(*given)
            return Ranked(importance, order)
        main, side = torch.cuda.current_stream(logits.device), _side_stream(logits.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            importance, order = _ops().rank(*given)
            return Ranked(importance, order, stream=side)


def reduce_tokens(
    tokens: Tokens,
    ranked: Ranked,
    prune: int,
    merge: int,
    operator: Operator,
    norm: nn.LayerNorm | None = None,
) -> tuple[Tokens, Tensor | None]:
    """The twin of reduction.reduce_tokens, and what `norm` makes of the tokens that are left."""
    if operator.operation != "prune-merge":
        prune = merge if operator.operation == "prune" else tokens.count
    joins = tokens.prefix < merge < prune
    if norm is not None and not _can_norm(norm, tokens.x):
        norm = None
    if ranked.stream is not None:
        torch.cuda.current_stream(tokens.x.device).wait_stream(ranked.stream)
    x, by_cost, importance = tokens.x, joins and operator.choice == "cost", None
    given = (
        x, *ranked[:2], tokens.size, tokens.length, tokens.prefix, prune, merge,
        operator.mean, by_cost, operator.floor, operator.keep_norm,
    )  # fmt: skip
    if _learns(x):
        norm = None
        if torch.compiler.is_compiling():
            x, size, log_size, importance, *_ = torch.ops.diffrate.reduce_mapped(*given)
            size, log_size, importance = size.detach(), log_size.detach(), importance.detach()
        else:
            x, size, log_size, importance = Reduction.apply(*given)
    else:
        affine = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
        x, size, log_size, normed, importance = _ops().reduce(*given, *affine)
    sized = joins or tokens.size is not None
    left = replace(
        tokens.with_features(x),
        size=size if sized else None,
        log_size=log_size if sized else None,
        importance=importance if operator.memory else None,
    )
    return left, normed if norm is not None else None


class TrainingAttention(torch.autograd.Function):
    """ops.attend_training with its gradient, at less cost a call than as an operator of torch."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        mixed, logits, log_sum = ops.attend_training(*given)
        ctx.save_for_backward(*given[:4], mixed, log_sum)
        ctx.mark_non_differentiable(logits)
        ctx.scale = given[4]
        return mixed, logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        q, k, v, size, mixed, log_sum = ctx.saved_tensors
        return *ops.attend_back(gradient, q, k, v, size, ctx.scale, mixed, log_sum), None, None, None


class Reduction(torch.autograd.Function):
    """ops.reduce_mapped with its gradient, at less cost a call than as an operator of torch."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, size, log_size, importance, destination, share = ops.reduce_mapped(*given)
        ctx.save_for_backward(destination, share)
        ctx.mark_non_differentiable(size, log_size, importance)
        ctx.others = len(given) - 1
        return x, size, log_size, importance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        return ops.spread(gradient, *ctx.saved_tensors), *([None] * ctx.others)


def add(tokens: Tokens, update: Tensor, norm: nn.LayerNorm | None) -> Tokens:
    """Tokens with `update` added and, where that can be done in passing, with what `norm` makes of them.

    A compiler fuses the two by itself.
    """
    x = tokens.x
    can = (
        norm is not None
        and _can_norm(norm, x)
        and not (_learns(x) or _learns(update))
        and update.dtype == x.dtype
    )
    if norm is None or not can or torch.compiler.is_compiling():
        return tokens.with_features(x + update)
    x, normed = ops.add_norm(x, update, norm.weight, norm.bias, norm.eps)
    return replace(tokens.with_features(x), normed=normed)


def add_measured(tokens: Tokens, update: Tensor) -> Tokens:
    """Tokens with `update` added and, where that can be done in passing, how long they are, for reduce_tokens."""
    x = tokens.x
    if _learns(x) or _learns(update) or update.dtype != x.dtype:
        return tokens.with_features(x + update)
    if torch.compiler.is_compiling():  # which fuses the two by itself
        x = x + update
        return replace(tokens.with_features(x), length=x.float().square().sum(-1).sqrt().clamp_min(1e-12))
    x, length = ops.add_measured(x, update)
    return replace(tokens.with_features(x), length=length)


def _can_norm(norm: nn.LayerNorm, x: Tensor) -> bool:
    """Whether a kernel may stand in for this norm: an affine one of features, in the features' type."""
    return (
        norm.normalized_shape == (x.shape[-1],)
        and norm.weight is not None
        and norm.bias is not None
        and norm.weight.dtype == x.dtype
        and not _learns(norm.weight)
        and not _learns(norm.bias)
        and not torch.is_autocast_enabled(x.device.type)
    )


def _beside(logits: Tensor) -> bool:
    """Whether ranking can run on a stream of its own: as a branch of a CUDA graph, where the GPU has room for it."""
    if torch.compiler.is_compiling() or not logits.is_cuda:
        return False
    return few(logits) and torch.cuda.is_current_stream_capturing()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _ops() -> Any:
    """The operators: as torch's own where a compiler must see them, else called directly, which is faster."""
    return torch.ops.diffrate if torch.compiler.is_compiling() else ops
