"""Triton kernels of the search-time forward: attention with a gradient for every key's mask, and matching.

Neither writes a matrix of tokens by tokens to memory. Their plain twins are in masking.py, which chooses between them.
Any length and any head width; the products take half-precision inputs and add up in fp32, as fused attention does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# For each kernel: tokens that one program holds, tokens that it takes at a time, its warps and stages.
# The fastest of a few dozen on an H200, for 197 tokens and heads of 64.
ATTEND = (128, 128, 4, 2)
GRAD_QUERIES = (64, 32, 4, 1)
GRAD_KEYS = (128, 32, 4, 3)
MOST_SIMILAR = (128, 128, 8, 3)
JOIN = (256, 32, 4, 1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(B, heads, N, d) mixed values over live keys and the query itself, and (B, heads, N) the log-sum of each row."""
    batch, heads, n, d = q.shape
    out = torch.empty(batch, n, heads, d, dtype=q.dtype, device=q.device).transpose(1, 2)
    log_sum = torch.empty(batch, heads, n, dtype=torch.float32, device=q.device)
    rows, step, warps, stages = ATTEND
    _attend[(triton.cdiv(n, rows), batch * heads)](
        q, k, v, key_bias, mask, out, log_sum, scale, heads, n, d,
        *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        rows, step, triton.next_power_of_2(d), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, log_sum


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, mask: Tensor, scale: float,
    out: Tensor, log_sum: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and, (B, N), of the masks."""
    batch, heads, n, d = q.shape
    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
    delta = torch.empty_like(log_sum)
    by_head = torch.empty(batch, heads, n, dtype=torch.float32, device=q.device)
    width = triton.next_power_of_2(d)
    # Queries first: they also leave each row's sum of gradient x output, which the keys need.
    rows, step, warps, stages = GRAD_QUERIES
    _grad_queries[(triton.cdiv(n, rows), batch * heads)](
        q, k, v, key_bias, mask, grad, out, log_sum, delta, grad_q, scale, heads, n, d,
        *q.stride(), *k.stride(), *v.stride(), *grad.stride(), *out.stride(), *grad_q.stride(),
        rows, step, width, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    rows, step, warps, stages = GRAD_KEYS
    _grad_keys[(triton.cdiv(n, rows), batch * heads)](
        q, k, v, key_bias, mask, grad, log_sum, delta, grad_k, grad_v, by_head, scale, heads, n, d,
        *q.stride(), *k.stride(), *v.stride(), *grad.stride(), *grad_k.stride(), *grad_v.stride(),
        rows, step, width, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return grad_q, grad_k, grad_v, by_head.sum(dim=1)  # summed over heads in a fixed order


def most_similar(x: Tensor, inverse_norm: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(B, N) highest cosine similarity of each token to any of `target`, -inf without one, and its index."""
    batch, n, width = x.shape
    similarity = torch.empty(batch, n, dtype=torch.float32, device=x.device)
    index = torch.empty(batch, n, dtype=torch.int64, device=x.device)
    rows, step, warps, stages = MOST_SIMILAR
    _most_similar[(triton.cdiv(n, rows), batch)](
        x, inverse_norm, target, similarity, index, n, width, *x.stride(),
        rows, step, 64, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return similarity, index


def join(x: Tensor, own: Tensor, sent: Tensor, index: Tensor) -> Tensor:
    """own x x, and for each token j, sent[j] x x[j] added to token index[j]."""
    batch, n, width = x.shape
    out = torch.empty(batch, n, width, dtype=x.dtype, device=x.device)
    rows, step, warps, stages = JOIN
    _join[(triton.cdiv(width, 64), triton.cdiv(n, rows), batch)](
        x, own, sent, index, out, n, width, *x.stride(), rows, step, 64, num_warps=warps, num_stages=stages
    )
    return out


@triton.jit
def _tile(base, rows, columns, n, d, row_stride, column_stride):
    at = base + rows[:, None] * row_stride + columns[None, :] * column_stride
    return tl.load(at, mask=(rows < n)[:, None] & (columns < d)[None, :], other=0.0)


@triton.jit
def _store(base, value, rows, columns, n, d, row_stride, column_stride):
    at = base + rows[:, None] * row_stride + columns[None, :] * column_stride
    tl.store(at, value.to(base.dtype.element_ty), mask=(rows < n)[:, None] & (columns < d)[None, :])


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, out_ptr, log_sum_ptr,
    scale, heads, n, d,
    qb, qh, qn, qd, kb, kh, kn, kd,
    vb, vh, vn, vd, ob, oh, on, od,
    R: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    image, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows, columns = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, D)
    q = _tile(q_ptr + image.to(tl.int64) * qb + head * qh, rows, columns, n, d, qn, qd)
    highest = tl.full([R], -1e30, tl.float32)
    total = tl.zeros([R], tl.float32)
    mixed = tl.zeros([R, D], tl.float32)
    for first in range(0, n, S):
        keys = first + tl.arange(0, S)
        k = _tile(k_ptr + image.to(tl.int64) * kb + head * kh, keys, columns, n, d, kn, kd)
        v = _tile(v_ptr + image.to(tl.int64) * vb + head * vh, keys, columns, n, d, vn, vd)
        bias = tl.load(bias_ptr + image * n + keys, mask=keys < n, other=0.0)
        live = tl.load(mask_ptr + image * n + keys, mask=keys < n, other=0.0) > 0.5
        seen = (live[None, :] | (rows[:, None] == keys[None, :])) & (keys < n)[None, :]
        logits = tl.where(seen, tl.dot(q, tl.trans(k)) * scale + bias[None, :], -1e30)
        higher = tl.maximum(highest, tl.max(logits, axis=1))
        weight = tl.where(seen, tl.exp(logits - higher[:, None]), 0.0)
        fade = tl.exp(highest - higher)
        total = total * fade + tl.sum(weight, axis=1)
        mixed = mixed * fade[:, None] + tl.dot(weight.to(v.dtype), v)
        highest = higher
    total = tl.where(rows < n, total, 1.0)
    _store(out_ptr + image.to(tl.int64) * ob + head * oh, mixed / total[:, None], rows, columns, n, d, on, od)
    tl.store(log_sum_ptr + tl.program_id(1) * n + rows, highest + tl.log(total), mask=rows < n)


@triton.jit
def _grad_queries(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, grad_ptr, out_ptr,
    log_sum_ptr, delta_ptr, grad_q_ptr, scale, heads, n, d,
    qb, qh, qn, qd, kb, kh, kn, kd, vb, vh, vn, vd,
    gb, gh, gn, gd, ob, oh, on, od,
    sb, sh, sn, sd, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    image, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows, columns = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, D)
    q = _tile(q_ptr + image.to(tl.int64) * qb + head * qh, rows, columns, n, d, qn, qd)
    grad = _tile(grad_ptr + image.to(tl.int64) * gb + head * gh, rows, columns, n, d, gn, gd)
    out = _tile(out_ptr + image.to(tl.int64) * ob + head * oh, rows, columns, n, d, on, od)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), axis=1)
    tl.store(delta_ptr + tl.program_id(1) * n + rows, delta, mask=rows < n)
    log_sum = tl.load(log_sum_ptr + tl.program_id(1) * n + rows, mask=rows < n, other=0.0)
    grad_q = tl.zeros([R, D], tl.float32)
    for first in range(0, n, S):
        keys = first + tl.arange(0, S)
        k = _tile(k_ptr + image.to(tl.int64) * kb + head * kh, keys, columns, n, d, kn, kd)
        v = _tile(v_ptr + image.to(tl.int64) * vb + head * vh, keys, columns, n, d, vn, vd)
        bias = tl.load(bias_ptr + image * n + keys, mask=keys < n, other=0.0)
        live = tl.load(mask_ptr + image * n + keys, mask=keys < n, other=0.0) > 0.5
        seen = (live[None, :] | (rows[:, None] == keys[None, :])) & (keys < n)[None, :] & (rows < n)[:, None]
        logits = tl.dot(q, tl.trans(k)) * scale + bias[None, :] - log_sum[:, None]
        weight = tl.where(seen, tl.exp(tl.where(seen, logits, 0.0)), 0.0)
        by_weight = tl.dot(grad, tl.trans(v))
        grad_q += tl.dot((weight * (by_weight - delta[:, None])).to(k.dtype), k)
    _store(grad_q_ptr + image.to(tl.int64) * sb + head * sh, grad_q * scale, rows, columns, n, d, sn, sd)


@triton.jit
def _grad_keys(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, grad_ptr, log_sum_ptr,
    delta_ptr, grad_k_ptr, grad_v_ptr, by_head_ptr, scale, heads, n, d,
    qb, qh, qn, qd, kb, kh, kn, kd, vb, vh, vn, vd,
    gb, gh, gn, gd, sb, sh, sn, sd,
    tb, th, tn, td, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    image, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    keys, columns = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, D)
    k = _tile(k_ptr + image.to(tl.int64) * kb + head * kh, keys, columns, n, d, kn, kd)
    v = _tile(v_ptr + image.to(tl.int64) * vb + head * vh, keys, columns, n, d, vn, vd)
    bias = tl.load(bias_ptr + image * n + keys, mask=keys < n, other=0.0)
    live = tl.load(mask_ptr + image * n + keys, mask=keys < n, other=0.0) > 0.5
    grad_k = tl.zeros([R, D], tl.float32)
    grad_v = tl.zeros([R, D], tl.float32)
    grad_mask = tl.zeros([R], tl.float32)
    for first in range(0, n, S):
        rows = first + tl.arange(0, S)
        q = _tile(q_ptr + image.to(tl.int64) * qb + head * qh, rows, columns, n, d, qn, qd)
        grad = _tile(grad_ptr + image.to(tl.int64) * gb + head * gh, rows, columns, n, d, gn, gd)
        log_sum = tl.load(log_sum_ptr + tl.program_id(1) * n + rows, mask=rows < n, other=0.0)
        delta = tl.load(delta_ptr + tl.program_id(1) * n + rows, mask=rows < n, other=0.0)
        # What each key would weigh if it were live, capped as in the plain twin; for live keys, what it weighs.
        logits = tl.dot(q, tl.trans(k)) * scale + bias[None, :] - log_sum[:, None]
        weight = tl.where((rows < n)[:, None], tl.exp(tl.minimum(logits, 20.0)), 0.0)
        sensitivity = weight * (tl.dot(grad, tl.trans(v)) - delta[:, None])
        itself = rows[:, None] == keys[None, :]
        seen = live[None, :] | itself
        grad_mask += tl.sum(tl.where(itself, 0.0, sensitivity), axis=0)
        grad_v += tl.dot(tl.trans(tl.where(seen, weight, 0.0)).to(grad.dtype), grad)
        grad_k += tl.dot(tl.trans(tl.where(seen, sensitivity, 0.0)).to(q.dtype), q)
    _store(grad_k_ptr + image.to(tl.int64) * sb + head * sh, grad_k * scale, keys, columns, n, d, sn, sd)
    _store(grad_v_ptr + image.to(tl.int64) * tb + head * th, grad_v, keys, columns, n, d, tn, td)
    tl.store(by_head_ptr + tl.program_id(1) * n + keys, grad_mask, mask=keys < n)


@triton.jit
def _most_similar(
    x_ptr, norm_ptr, target_ptr, similarity_ptr, index_ptr, n, width,
    xb, xn, xc, R: tl.constexpr, S: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(1)
    x_ptr += image.to(tl.int64) * xb
    rows = tl.program_id(0) * R + tl.arange(0, R)
    norm = tl.load(norm_ptr + image * n + rows, mask=rows < n, other=0.0)
    best = tl.full([R], float("-inf"), tl.float32)
    index = tl.zeros([R], tl.int32)
    for first in range(0, n, S):
        others = first + tl.arange(0, S)
        product = tl.zeros([R, S], tl.float32)
        for start in range(0, width, W):
            columns = start + tl.arange(0, W)
            a = _tile(x_ptr, rows, columns, n, width, xn, xc).to(tl.float32)
            b = _tile(x_ptr, others, columns, n, width, xn, xc).to(tl.float32)
            product += tl.dot(a, tl.trans(b), input_precision="tf32x3")
        theirs = tl.load(norm_ptr + image * n + others, mask=others < n, other=0.0)
        allowed = tl.load(target_ptr + image * n + others, mask=others < n, other=0) != 0
        cosine = tl.where(allowed[None, :], product * norm[:, None] * theirs[None, :], float("-inf"))
        highest = tl.max(cosine, axis=1)
        where = tl.min(tl.where(cosine == highest[:, None], others[None, :], n), axis=1)
        index = tl.where(highest > best, where, index)
        best = tl.maximum(best, highest)
    tl.store(similarity_ptr + image * n + rows, best, mask=rows < n)
    tl.store(index_ptr + image * n + rows, index.to(tl.int64), mask=rows < n)


@triton.jit
def _join(
    x_ptr, own_ptr, sent_ptr, index_ptr, out_ptr, n, width,
    xb, xn, xc, R: tl.constexpr, S: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(2)
    x_ptr += image.to(tl.int64) * xb
    columns = tl.program_id(0) * W + tl.arange(0, W)
    rows = tl.program_id(1) * R + tl.arange(0, R)
    coming = tl.zeros([R, W], tl.float32)
    for first in range(0, n, S):
        others = first + tl.arange(0, S)
        sent = tl.load(sent_ptr + image * n + others, mask=others < n, other=0.0)
        index = tl.load(index_ptr + image * n + others, mask=others < n, other=0)
        share = tl.where(rows[:, None] == index[None, :], sent[None, :], 0.0)
        x = _tile(x_ptr, others, columns, n, width, xn, xc).to(tl.float32)
        coming += tl.dot(share, x, input_precision="tf32")
    own = tl.load(own_ptr + image * n + rows, mask=rows < n, other=0.0)
    x = _tile(x_ptr, rows, columns, n, width, xn, xc).to(tl.float32)
    _store(
        out_ptr + image.to(tl.int64) * n * width, own[:, None] * x + coming, rows, columns, n, width, width, 1
    )
