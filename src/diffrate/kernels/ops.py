"""The Triton kernels as operators of torch, so that compile, export and CUDA graphs see one opaque step each.

    diffrate::class_logits  the class token's logits: one row, where attention itself is torch's
    diffrate::reduce        rank, match and assemble: tokens in, fewer tokens out
    diffrate::reduce_mapped the same, and where each token went: from that its gradient is one gather
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
MEANS = {"plain": 0, "size": 1, "attention": 2}

_library = torch.library.Library("diffrate", "DEF")


@functools.cache
def kernels() -> Any:
    """The module of kernels; imported with the first one that runs, because Triton takes a second to load."""
    return importlib.import_module("diffrate.kernels.triton_kernels")


def _register(schema: str, function: Any, fake: Any) -> None:
    _library.define(schema)
    name = schema.partition("(")[0]

    def on_its_device(*arguments: Any) -> Any:
        with torch.cuda.device_of(
            arguments[0]
        ):  # Triton launches on the current GPU, wherever the tensors are
            return function(*arguments)

    _library.impl(name, on_its_device, "CompositeExplicitAutograd")
    torch.library.register_fake(f"diffrate::{name}", fake, lib=_library)


def class_logits(q: Tensor, k: Tensor, size: Tensor | None, scale: float) -> Tensor:
    """(B, heads, N) logits of the first query."""
    q, k = _rows_dense(q), _rows_dense(k)
    b, heads, n, d = k.shape
    logits = _class_logits_output(q, k, size, scale)
    if b:
        kernels().class_logits_kernel[(b * heads,)](
            q, k, size if size is not None else q, logits,
            q.stride(0), q.stride(1), *k.stride()[:3],
            scale * LOG2_E, heads, n, d,
            HAS_SIZE=size is not None, BLOCK_N=64, BLOCK_D=_power_of_two(d), num_warps=4,
        )  # fmt: skip
    return logits


def _class_logits_output(q: Tensor, k: Tensor, size: Tensor | None, scale: float) -> Tensor:
    return k.new_empty(k.shape[:3], dtype=torch.float32)


def reduce(
    x: Tensor,
    logits: Tensor,
    size: Tensor | None,
    prefix: int,
    prune: int,
    keep: int,
    mean: str,
    by_cost: bool,
    floor: float,
) -> tuple[Tensor, Tensor]:
    """(B, keep, C) tokens and (B, keep) sizes: see reduction.reduce_tokens.

    prune    tokens that pruning leaves; those ranked from `keep` on join the image tokens before them.
    by_cost  ranked by what merging them would lose, of all tokens, and not by their importance.
    """
    return reduce_mapped(x, logits, size, prefix, prune, keep, mean, by_cost, floor, mapped=False)[:2]


def reduce_mapped(
    x: Tensor,
    logits: Tensor,
    size: Tensor | None,
    prefix: int,
    prune: int,
    keep: int,
    mean: str,
    by_cost: bool,
    floor: float,
    mapped: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with (B, N) where in the result each token went, and (B, N) by what share: 0 for what was pruned."""
    x = x.contiguous()
    with step("ranking"):
        importance, order = rank(logits, prefix)
        if by_cost:
            order = rank_by_cost(x, importance, prefix, floor)
    with step("merge"):
        return _assemble(x, importance, order, size, prefix, prune, keep, mean, mapped)


def _assemble(
    x: Tensor,
    importance: Tensor,
    order: Tensor,
    size: Tensor | None,
    prefix: int,
    prune: int,
    keep: int,
    mean: str,
    mapped: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Match what joins, and write what stays."""
    joins = prune > keep > prefix
    b, n, c = x.shape
    joining = prune - keep if joins else 0
    similarity, target = match(x, order, prefix, keep, joining)
    out, out_size = _kept(x, keep)
    destination, share = _map(x) if mapped else (order, importance)
    rows = _token_tile(b, keep)
    count = _tiles(keep, rows)
    if b:
        kernels().assemble_kernel[(count * b,)](
            x, size if size is not None else x, importance, order, similarity, target, out, out_size,
            destination, share,
            n, c, prefix, keep, joining, count, similarity.shape[1],
            HAS_SIZE=size is not None, JOINS=joins, MEAN=MEANS[mean], MAPPED=mapped,
            BLOCK_T=rows, BLOCK_J=_power_of_two(joining), BLOCK_C=64, num_warps=8 if joining > 64 else 4,
        )  # fmt: skip
    return out, out_size, destination, share


def _map(x: Tensor) -> tuple[Tensor, Tensor]:
    """Room for where each token went and by what share: nowhere, before a kernel writes it."""
    return x.new_zeros(x.shape[:2], dtype=torch.int32), x.new_zeros(x.shape[:2], dtype=torch.float32)


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
    ctx.save_for_backward(output[2], output[3])


def _spread_back(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return torch.ops.diffrate.spread(gradient, *ctx.saved_tensors), *([None] * 8)


def _reduce_outputs(
    x: Tensor,
    logits: Tensor,
    size: Tensor | None,
    prefix: int,
    prune: int,
    keep: int,
    mean: str,
    by_cost: bool,
    floor: float,
) -> tuple[Tensor, Tensor]:
    return _kept(x, keep)


def _reduce_mapped_outputs(
    x: Tensor,
    logits: Tensor,
    size: Tensor | None,
    prefix: int,
    prune: int,
    keep: int,
    mean: str,
    by_cost: bool,
    floor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_kept(x, keep), *_map(x)


def _kept(x: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Room for `keep` tokens of each image, and for their sizes."""
    b, _, c = x.shape
    return x.new_empty((b, keep, c)), x.new_empty((b, keep), dtype=torch.float32)


def rank(logits: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """(B, N) importance and (B, N) token indices in its order, prefix first."""
    b, heads, n = logits.shape
    importance = logits.new_empty((b, n))
    order = logits.new_empty((b, n), dtype=torch.int32)
    if b:
        kernels().rank_kernel[(b,)](
            logits, importance, order, heads, n, prefix,
            BLOCK_N=_power_of_two(n), CHUNK=16, num_warps=max(4, _power_of_two(n) // 64),
        )  # fmt: skip
    return importance, order


def rank_by_cost(x: Tensor, importance: Tensor, prefix: int, floor: float) -> Tensor:
    """(B, N) token indices in the order of what merging each away would lose, prefix first."""
    b, n, c = x.shape
    loss = torch.empty_like(importance)
    order = importance.new_empty((b, n), dtype=torch.int32)
    rows = _token_tile(b, n)
    count = _tiles(n, rows)
    if b:
        kernels().loss_kernel[(count * b,)](
            x,
            importance,
            loss,
            n,
            c,
            prefix,
            count,
            float(floor),
            BLOCK_M=rows,
            BLOCK_N=64,
            BLOCK_C=64,
            num_warps=4,
        )
        kernels().order_kernel[(b,)](
            loss,
            order,
            n,
            prefix,
            BLOCK_N=_power_of_two(n),
            CHUNK=16,
            num_warps=max(4, _power_of_two(n) // 64),
        )
    return order


def match(x: Tensor, order: Tensor, prefix: int, first: int, joining: int) -> tuple[Tensor, Tensor]:
    """(B, tiles, J) highest cosine similarity of each joiner in each tile of targets, and the target's place."""
    b, n, c = x.shape
    rows = _token_tile(b, first - prefix)
    count = _tiles(first - prefix, rows) if joining else 0
    similarity = x.new_empty((b, count, joining), dtype=torch.float32)
    target = x.new_empty((b, count, joining), dtype=torch.int32)
    if b and joining:
        kernels().match_kernel[(count * b,)](
            x, order, similarity, target, n, c, prefix, first, joining, count,
            BLOCK_J=min(64, _power_of_two(joining)), BLOCK_T=rows, BLOCK_C=64, num_warps=4,
        )  # fmt: skip
    return similarity, target


def _token_tile(batch: int, tokens: int) -> int:
    """Tokens a program works on: many where there are images enough to fill a GPU, else few."""
    most = 64 if batch >= 32 else 16
    return min(most, _power_of_two(tokens))


def _rows_dense(t: Tensor) -> Tensor:
    """Kernels step through batch, heads and tokens by strides, and through features one by one."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _tiles(length: int, tile: int) -> int:
    return -(-length // tile)


def _power_of_two(n: int) -> int:
    """The smallest power of two that holds n, at least 16: what a tile can be."""
    return max(16, 1 << max(n - 1, 0).bit_length())


_register(
    "class_logits(Tensor q, Tensor k, Tensor? size, float scale) -> Tensor",
    class_logits,
    _class_logits_output,
)
_register(
    "reduce(Tensor x, Tensor logits, Tensor? size, int prefix, int prune, int keep, str mean, bool by_cost,"
    " float floor) -> (Tensor, Tensor)",
    reduce,
    _reduce_outputs,
)
_register(
    "reduce_mapped(Tensor x, Tensor logits, Tensor? size, int prefix, int prune, int keep, str mean, bool by_cost,"
    " float floor) -> (Tensor, Tensor, Tensor, Tensor)",
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
