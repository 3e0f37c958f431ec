"""Operators of attention: see ops."""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import torch
from torch import Tensor

from diffrate.kernels.operators import (
    library,
    on_its_device,
    or_any,
    power_of_two,
    register,
    rows_dense,
    tiles,
)

LOG2_E = math.log2(math.e)
MOST_KEYS = 128  # of a head in training, which one program holds


@functools.cache
def kernels() -> Any:
    """The module of kernels; imported with the first one that runs, because Triton takes a second to load."""
    return importlib.import_module("diffrate.kernels.attention_kernels")


@on_its_device
def query_logits(q: Tensor, k: Tensor, size: Tensor | None, scale: float, prefix: int, others: int) -> Tensor:
    """(B, heads, 1 + others, N) logits of the class token and of image tokens spread evenly: ranking.image_queries."""
    q, k = rows_dense(q), rows_dense(k)
    b, heads, n, d = k.shape
    logits = _query_logits_output(q, k, size, scale, prefix, others)
    if b:
        kernels().query_logits_kernel[(b * heads,)](
            q, k, or_any(size, q), logits,
            *q.stride()[:3], *k.stride()[:3],
            scale * LOG2_E, heads, n, d, prefix,
            HAS_SIZE=size is not None, OTHERS=others, BLOCK_N=64, BLOCK_D=power_of_two(d), num_warps=4,
        )  # fmt: skip
    return logits


def _query_logits_output(
    q: Tensor, k: Tensor, size: Tensor | None, scale: float, prefix: int, others: int
) -> Tensor:
    b, heads, n, _ = k.shape
    return k.new_empty((b, heads, 1 + others, n), dtype=torch.float32)


@on_its_device
def attend(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor | None, scale: float, row: bool
) -> tuple[Tensor, Tensor]:
    """(B, heads, N, d) mixed values, in memory (B, N, heads, d), and the logits of the first query (`row`)."""
    q, k, v = rows_dense(q), rows_dense(k), rows_dense(v)
    b, heads, n, d = k.shape
    mixed, logits = _attend_outputs(q, k, v, size, scale, row)
    if b:
        # In 16 bits mostly all keys at once; of wider heads, as of fp32, more of them do not fit into the registers.
        rows, most = 16, 256 if q.element_size() == 2 and d <= 64 else 64
        keys, (wide, more) = min(most, power_of_two(n)), parts(d)
        kernels().attend_kernel[(tiles(n, rows), b * heads)](
            q, k, v, or_any(size, q), mixed, logits,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            scale * LOG2_E, heads, n, d,
            HAS_SIZE=size is not None, ROW=row, BLOCK_M=rows, BLOCK_N=keys, BLOCK_D=wide, BLOCK_E=more,
            num_warps=4, num_stages=1 if n <= keys else 3 if q.element_size() == 2 else 2,
        )  # fmt: skip
    return mixed, logits


def parts(d: int) -> tuple[int, int]:
    """Powers of two that hold the d features of a head together: one, or two where those hold less in vain."""
    whole = power_of_two(d)
    rest = power_of_two(d - whole // 2, least=32)  # narrower products of so few rows leave tensor cores idle
    return (whole // 2, rest) if whole // 2 + rest < whole else (whole, 0)


def _attend_outputs(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor | None, scale: float, row: bool
) -> tuple[Tensor, Tensor]:
    b, heads, n, d = k.shape
    return v.new_empty((b, n, heads, d)).transpose(1, 2), k.new_empty(
        (b, heads, 1, n if row else 0), dtype=torch.float32
    )


@on_its_device
def attend_training(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor, scale: float, row: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend` in training, for images of up to MOST_KEYS tokens; and the log-sums of rows, for `attend_back`."""
    q, k, v = rows_dense(q), rows_dense(k), rows_dense(v)
    b, heads, n, d = k.shape
    mixed, logits, log_sum = _attend_training_outputs(q, k, v, size, scale, row)
    if b:
        kernels().attend_training_kernel[(b * heads * tiles(n, 64),)](
            q, k, v, size, mixed, log_sum, logits,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            scale * LOG2_E, heads, n, d,
            ROW=row, BLOCK_M=64, BLOCK_N=power_of_two(n, least=64), BLOCK_D=power_of_two(d), num_warps=4, num_stages=1,
        )  # fmt: skip
    return mixed, logits, log_sum


def _attend_training_outputs(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor, scale: float, row: bool
) -> tuple[Tensor, Tensor, Tensor]:
    b, heads, n, _ = k.shape
    return *_attend_outputs(q, k, v, size, scale, row), k.new_empty((b, heads, n), dtype=torch.float32)


@on_its_device
def attend_back(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Tensor,
    scale: float,
    mixed: Tensor,
    log_sum: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, from that of `mixed`, which is as attend_training made it."""
    gradient, q, k, v = rows_dense(gradient), rows_dense(q), rows_dense(k), rows_dense(v)
    b, heads, n, d = k.shape
    found = _attend_back_outputs(gradient, q, k, v, size, scale, mixed, log_sum)
    if b:
        keys = power_of_two(n, least=64)
        kernels().attend_back_kernel[(b * heads,)](
            gradient, q, k, v, size, mixed, log_sum, *found,
            *gradient.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *found[0].stride()[:3],
            scale, LOG2_E, heads, n, d,
            BLOCK_M=4096 // keys, BLOCK_N=keys, BLOCK_D=power_of_two(d), num_warps=4, num_stages=1,
        )  # fmt: skip
    return found


def _attend_back_outputs(
    _: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in (q, k, v))
    return q, k, v


def _remember_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, size, ctx.scale, _ = inputs
    ctx.save_for_backward(q, k, v, size, output[0], output[2])


def _attention_back(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, size, mixed, log_sum = ctx.saved_tensors
    found = torch.ops.diffrate.attend_back(gradient, q, k, v, size, ctx.scale, mixed, log_sum)
    return *found, None, None, None


register(
    "query_logits(Tensor q, Tensor k, Tensor? size, float scale, int prefix, int others) -> Tensor",
    query_logits,
    _query_logits_output,
)
register(
    "attend(Tensor q, Tensor k, Tensor v, Tensor? size, float scale, bool row) -> (Tensor, Tensor)",
    attend,
    _attend_outputs,
)
register(
    "attend_training(Tensor q, Tensor k, Tensor v, Tensor size, float scale, bool row) -> (Tensor, Tensor, Tensor)",
    attend_training,
    _attend_training_outputs,
)
register(
    "attend_back(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor size, float scale, Tensor mixed, Tensor log_sum)"
    " -> (Tensor, Tensor, Tensor)",
    attend_back,
    _attend_back_outputs,
)
torch.library.register_autograd(
    "diffrate::attend_training", _attention_back, setup_context=_remember_attention, lib=library
)
