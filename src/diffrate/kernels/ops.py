"""The Triton kernels as operators of torch, so that compile, export and CUDA graphs see one opaque step each.

    diffrate::attend        attention, and the class token's logits, for few images
    diffrate::query_logits  logits of the queries that rank: a few rows, where attention itself is torch's
    diffrate::rank          importance and order of the tokens, from those logits
    diffrate::reduce        match and assemble: tokens in, fewer tokens out, and the norm behind them
    diffrate::reduce_mapped the same without the norm, and where each token went: from that its gradient is one gather
    diffrate::spread        that gather

Logits have base 2. Of gradients there are those of the features; logits and sizes have none, as in `reduction`.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import torch
from torch import Tensor

from diffrate.steps import step

LOG2_E = math.log2(math.e)
MANY = 32  # images that fill a GPU with programs of 64 tokens
EXTRA = 8  # features beside a head's own: of 16 bits, rows of whole 16 bytes
MEANS = {"plain": 0, "size": 1, "attention": 2}

_library = torch.library.Library("diffrate", "DEF")


@functools.cache
def kernels() -> Any:
    """The module of kernels; imported with the first one that runs, because Triton takes a second to load."""
    return importlib.import_module("diffrate.kernels.triton_kernels")


def _on_its_device(function: Any) -> Any:
    """Triton launches on the current GPU, wherever the tensors are: make it theirs."""

    @functools.wraps(function)
    def run(first: Tensor, *rest: Any) -> Any:
        if not first.is_cuda or first.device.index == torch.cuda.current_device():
            return function(first, *rest)
        with torch.cuda.device(first.device):
            return function(first, *rest)

    return run


def _register(schema: str, function: Any, fake: Any) -> None:
    _library.define(schema)
    name = schema.partition("(")[0]

    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"diffrate::{name}", fake, lib=_library)


@_on_its_device
def query_logits(q: Tensor, k: Tensor, size: Tensor | None, scale: float, prefix: int, others: int) -> Tensor:
    """(B, heads, 1 + others, N) logits of the class token and of image tokens spread evenly: ranking.image_queries."""
    q, k = _rows_dense(q), _rows_dense(k)
    b, heads, n, d = k.shape
    logits = _query_logits_output(q, k, size, scale, prefix, others)
    if b:
        kernels().query_logits_kernel[(b * heads,)](
            q, k, _or(size, q), logits,
            *q.stride()[:3], *k.stride()[:3],
            scale * LOG2_E, heads, n, d, prefix,
            HAS_SIZE=size is not None, OTHERS=others, BLOCK_N=64, BLOCK_D=_power_of_two(d), num_warps=4,
        )  # fmt: skip
    return logits


def _query_logits_output(
    q: Tensor, k: Tensor, size: Tensor | None, scale: float, prefix: int, others: int
) -> Tensor:
    b, heads, n, _ = k.shape
    return k.new_empty((b, heads, 1 + others, n), dtype=torch.float32)


@_on_its_device
def widen(q: Tensor, k: Tensor, size: Tensor, scale: float, row: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(B, heads, N, d + EXTRA) queries and keys whose scaled products have log(size) in them, and `row` as in attend.

    In memory (B, N, heads, d + EXTRA). Attention without a bias is faster than with one, by more than this costs.
    """
    q, k = _rows_dense(q), _rows_dense(k)
    b, heads, n, d = k.shape
    wide_q, wide_k, logits = _widen_outputs(q, k, size, scale, row)
    if b:
        kernels().widen_kernel[(b * heads,)](
            q, k, size, wide_q, wide_k, logits,
            *q.stride()[:3], *k.stride()[:3],
            scale, LOG2_E, heads, n, d,
            ROW=row, EXTRA=EXTRA, BLOCK_N=64, BLOCK_D=_power_of_two(d), num_warps=4,
        )  # fmt: skip
    return wide_q, wide_k, logits


def _widen_outputs(
    q: Tensor, k: Tensor, size: Tensor, scale: float, row: bool
) -> tuple[Tensor, Tensor, Tensor]:
    b, heads, n, d = k.shape
    wide = (b, n, heads, d + EXTRA)
    logits = k.new_empty((b, heads, 1, n if row else 0), dtype=torch.float32)
    return q.new_empty(wide).transpose(1, 2), k.new_empty(wide).transpose(1, 2), logits


@_on_its_device
def attend(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor | None, scale: float, row: bool
) -> tuple[Tensor, Tensor]:
    """(B, heads, N, d) mixed values, in memory (B, N, heads, d), and the logits of the first query (`row`)."""
    q, k, v = _rows_dense(q), _rows_dense(k), _rows_dense(v)
    b, heads, n, d = k.shape
    mixed, logits = _attend_outputs(q, k, v, size, scale, row)
    if b:
        rows = 16 if d <= 64 else 32
        keys = min(
            256 if q.element_size() == 2 else 64, _power_of_two(n)
        )  # in 16 bits mostly all of them at once
        kernels().attend_kernel[(_tiles(n, rows), b * heads)](
            q, k, v, _or(size, q), mixed, logits,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            scale * LOG2_E, heads, n, d,
            HAS_SIZE=size is not None, ROW=row, BLOCK_M=rows, BLOCK_N=keys, BLOCK_D=_power_of_two(d),
            num_warps=8 if rows * keys > 4096 else 4, num_stages=1 if n <= keys else 2,
        )  # fmt: skip
    return mixed, logits


def _attend_outputs(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor | None, scale: float, row: bool
) -> tuple[Tensor, Tensor]:
    b, heads, n, d = k.shape
    return v.new_empty((b, n, heads, d)).transpose(1, 2), k.new_empty(
        (b, heads, 1, n if row else 0), dtype=torch.float32
    )


@_on_its_device
def rank(logits: Tensor, prefix: int, image_share: float) -> tuple[Tensor, Tensor]:
    """(B, N) importance and (B, N) token indices in its order, prefix first, from (B, heads, R, N) logits."""
    b, heads, queries, n = logits.shape
    importance, order = _rank_outputs(logits, prefix, image_share)
    if b:
        width = _power_of_two(n)
        share = image_share if queries > 1 else 0.0
        kernels().rank_kernel[(b,)](
            logits, importance, order, heads * queries, n, prefix,
            (1 - share) / heads, share / heads / max(queries - 1, 1), queries,
            BLOCK_H=min(16, _power_of_two(heads * queries, least=2)), BLOCK_N=width, num_warps=max(4, width // 64),
        )  # fmt: skip
    return importance, order


def _rank_outputs(logits: Tensor, prefix: int, image_share: float) -> tuple[Tensor, Tensor]:
    b, n = logits.shape[0], logits.shape[-1]
    return logits.new_empty((b, n)), logits.new_empty((b, n), dtype=torch.int32)


@_on_its_device
def reduce(
    x: Tensor,
    importance: Tensor,
    order: Tensor,
    size: Tensor | None,
    prefix: int,
    prune: int,
    keep: int,
    mean: str,
    by_cost: bool,
    floor: float,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(B, keep, C) tokens, (B, keep) sizes and their logarithms, and the tokens' layer norm.

    The twin of reduction.reduce_tokens.

    prune    tokens that pruning leaves; those ranked from `keep` on join the image tokens before them.
    by_cost  ranked by what merging them would lose, of all tokens, and not by their importance.
    weight, bias, eps  of the layer norm; without them there is none, and the last result is empty.

    Logarithms have the features' type and rows of whole 16 bytes, as attention wants its bias.
    """
    kept = _kept(x, keep, weight)
    _reduce(
        x, importance, order, size, prefix, prune, keep, mean, by_cost, floor, kept, (weight, bias, eps), None
    )
    return kept


@_on_its_device
def reduce_mapped(
    x: Tensor,
    importance: Tensor,
    order: Tensor,
    size: Tensor | None,
    prefix: int,
    prune: int,
    keep: int,
    mean: str,
    by_cost: bool,
    floor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens, sizes and their logarithms; (B, N) where each token went, and by what share: 0 for what was pruned."""
    kept, places = _kept(x, keep, None), _map(x)
    _reduce(
        x, importance, order, size, prefix, prune, keep, mean, by_cost, floor, kept, (None, None, 0.0), places
    )
    return *kept[:3], *places


def _reduce(
    x: Tensor,
    importance: Tensor,
    order: Tensor,
    size: Tensor | None,
    prefix: int,
    prune: int,
    keep: int,
    mean: str,
    by_cost: bool,
    floor: float,
    kept: tuple[Tensor, Tensor, Tensor, Tensor],
    norm: tuple[Tensor | None, Tensor | None, float],
    places: tuple[Tensor, Tensor] | None,
) -> None:
    """Fill `kept` and, where they are wanted, the places that tokens went to."""
    x = x.contiguous()
    out, out_size, log_size, normed = kept
    weight, bias, eps = norm
    if by_cost:
        with step("ranking"):
            order = rank_by_cost(x, importance, prefix, floor)
    with step("merge"):
        joins = prune > keep > prefix
        b, n, c = x.shape
        joining = prune - keep if joins else 0
        similarity, target = match(x, order, prefix, keep, joining)
        destination, share = (order, importance) if places is None else places
        whole = b < MANY and joining <= 32 and c <= 1024
        rows = 16 if b < MANY else 32
        count = _tiles(keep, rows)
        if b:
            kernels().assemble_kernel[(count * b,)](
                x, _or(size, x), importance, order, similarity, target, out, out_size, log_size,
                _or(weight, x), _or(bias, x), normed, destination, share,
                n, c, prefix, keep, joining, count, similarity.shape[1], log_size.stride(0), eps,
                HAS_SIZE=size is not None, JOINS=joins, MEAN=MEANS[mean], NORM=weight is not None, WHOLE=whole,
                MAPPED=places is not None,
                BLOCK_T=rows, BLOCK_J=_power_of_two(joining), BLOCK_C=_power_of_two(c) if whole else 128,
                BLOCK_K=_power_of_two(similarity.shape[1], least=16 if b < MANY else 4),
                num_warps=8 if whole or joining > 64 else 4, num_stages=2,
            )  # fmt: skip


@_on_its_device
def add_norm(x: Tensor, update: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + update (B, N, C) and its layer norm."""
    x, update = x.contiguous(), update.contiguous()
    b, n, c = x.shape
    out, normed = torch.empty_like(x), torch.empty_like(x)
    if b * n:
        width = _power_of_two(c)
        kernels().add_norm_kernel[(b * n,)](
            x,
            update,
            weight,
            bias,
            out,
            normed,
            c,
            eps,
            BLOCK_C=width,
            num_warps=max(1, min(8, width // 256)),
        )
    return out, normed


def _map(x: Tensor) -> tuple[Tensor, Tensor]:
    """Room for where each token went and by what share: nowhere, before a kernel writes it."""
    return x.new_zeros(x.shape[:2], dtype=torch.int32), x.new_zeros(x.shape[:2], dtype=torch.float32)


@_on_its_device
def spread(gradient: Tensor, destination: Tensor, share: Tensor) -> Tensor:
    """(B, N, C) gradient of the tokens that a reduction got, from the (B, keep, C) of those that it gave."""
    gradient = gradient.contiguous()
    b, keep, c = gradient.shape
    n = destination.shape[1]
    out = _spread_output(gradient, destination, share)
    if b:
        kernels().spread_kernel[(b * n,)](
            gradient, destination, share, out, n, c, keep, BLOCK_C=_power_of_two(c), num_warps=4
        )
    return out


def _spread_output(gradient: Tensor, destination: Tensor, share: Tensor) -> Tensor:
    b, n = destination.shape
    return gradient.new_empty((b, n, gradient.shape[2]))


def _remember_map(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[3], output[4])


def _spread_back(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return torch.ops.diffrate.spread(gradient, *ctx.saved_tensors), *([None] * 9)


def _reduce_mapped_outputs(
    x: Tensor,
    importance: Tensor,
    order: Tensor,
    size: Tensor | None,
    prefix: int,
    prune: int,
    keep: int,
    mean: str,
    by_cost: bool,
    floor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return *_kept(x, keep, None)[:3], *_map(x)


def _reduce_outputs(
    x: Tensor,
    importance: Tensor,
    order: Tensor,
    size: Tensor | None,
    prefix: int,
    prune: int,
    keep: int,
    mean: str,
    by_cost: bool,
    floor: float,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _kept(x, keep, weight)


def _kept(x: Tensor, keep: int, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for `keep` tokens of each image, for their sizes and logarithms of sizes, and for their norm."""
    b, _, c = x.shape
    return (
        x.new_empty((b, keep, c)),
        x.new_empty((b, keep), dtype=torch.float32),
        x.new_empty((b, keep + -keep % 8))[:, :keep],
        x.new_empty((b, keep if weight is not None else 0, c)),
    )


def rank_by_cost(x: Tensor, importance: Tensor, prefix: int, floor: float) -> Tensor:
    """(B, N) token indices in the order of what merging each away would lose, prefix first."""
    b, n, c = x.shape
    loss = torch.empty_like(importance)
    order = importance.new_empty((b, n), dtype=torch.int32)
    rows, width = _token_tile(b, n), _power_of_two(n)
    count = _tiles(n, rows)
    if b:
        kernels().loss_kernel[(count * b,)](
            x, importance, loss, n, c, prefix, count, float(floor),
            BLOCK_M=rows, BLOCK_N=64, BLOCK_C=32, num_warps=4, num_stages=4,
        )  # fmt: skip
        kernels().order_kernel[(b,)](loss, order, n, prefix, BLOCK_N=width, num_warps=max(4, width // 64))
    return order


def match(x: Tensor, order: Tensor, prefix: int, first: int, joining: int) -> tuple[Tensor, Tensor]:
    """(B, tiles, J) highest cosine similarity of each joiner in each tile of targets, and the target's place."""
    b, n, c = x.shape
    rows = _token_tile(b, first - prefix)
    count = _tiles(first - prefix, rows) if joining else 0
    similarity = x.new_empty((b, count, joining), dtype=torch.float32)
    target = x.new_empty((b, count, joining), dtype=torch.int32)
    if b and joining:
        width = min(64, _power_of_two(joining))
        deep = b < MANY and width <= 16  # one image waits for its loads: ask for many at once
        kernels().match_kernel[(count * b,)](
            x, order, similarity, target, n, c, prefix, first, joining, count,
            BLOCK_J=width, BLOCK_T=rows,
            BLOCK_C=256 if deep else 32, num_warps=4, num_stages=1 if deep else 3,
        )  # fmt: skip
    return similarity, target


def _token_tile(batch: int, tokens: int) -> int:
    """Tokens a program works on: many where there are images enough to fill a GPU, else few."""
    return min(64 if batch >= MANY else 16, _power_of_two(tokens))


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A kernel's argument that it does not look at must still be some tensor."""
    return other if tensor is None else tensor


def _rows_dense(t: Tensor) -> Tensor:
    """Kernels step through batch, heads and tokens by strides, and through features one by one."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _tiles(length: int, tile: int) -> int:
    return -(-length // tile)


def _power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that holds n; a tile of a product is at least 16 wide."""
    return max(least, 1 << max(n - 1, 0).bit_length())


_register(
    "query_logits(Tensor q, Tensor k, Tensor? size, float scale, int prefix, int others) -> Tensor",
    query_logits,
    _query_logits_output,
)
_register(
    "widen(Tensor q, Tensor k, Tensor size, float scale, bool row) -> (Tensor, Tensor, Tensor)",
    widen,
    _widen_outputs,
)
_register(
    "attend(Tensor q, Tensor k, Tensor v, Tensor? size, float scale, bool row) -> (Tensor, Tensor)",
    attend,
    _attend_outputs,
)
_register("rank(Tensor logits, int prefix, float image_share) -> (Tensor, Tensor)", rank, _rank_outputs)
_register(
    "reduce(Tensor x, Tensor importance, Tensor order, Tensor? size, int prefix, int prune, int keep,"
    " str mean, bool by_cost, float floor, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    reduce,
    _reduce_outputs,
)
_register(
    "reduce_mapped(Tensor x, Tensor importance, Tensor order, Tensor? size, int prefix, int prune, int keep, str mean,"
    " bool by_cost, float floor) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reduce_mapped,
    _reduce_mapped_outputs,
)
_register(
    "spread(Tensor gradient, Tensor destination, Tensor share) -> Tensor",
    spread,
    _spread_output,
)
torch.library.register_autograd(
    "diffrate::reduce_mapped", _spread_back, setup_context=_remember_map, lib=_library
)
