"""Triton kernels of attention: all of it for few images or tokens, or what ranking and sizes need beside torch's own.

Token counts are plain arguments, and not special where they are 1 or a multiple of 16 (`do_not_specialize`), so that
one compiled kernel serves every block and every batch. Logits are fp32, whatever the features are. `attention` holds
what calls them; `ranking` and `mixing` are their plain twins.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["H", "N"])
def attend_kernel(
    Q, K, V, SIZE, OUT, LOGITS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    scale, H, N, D,
    HAS_SIZE: tl.constexpr, ROW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head: values mixed by attention and, ROW, the class token's logits in base 2.

    A head's features are taken in two parts, of BLOCK_D and, if there are more, BLOCK_E.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1)
    b = (head // H).to(tl.int64)
    h = head % H
    d = tl.arange(0, BLOCK_D)
    inside_m = (m[:, None] < N) & (d[None, :] < D)
    queries = Q + b * q_b + h * q_h + m[:, None] * q_n
    q = tl.load(queries + d[None, :], mask=inside_m, other=0.0)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if BLOCK_E:
        e = BLOCK_D + tl.arange(0, BLOCK_E)
        inside_e = (m[:, None] < N) & (e[None, :] < D)
        more_q = tl.load(queries + e[None, :], mask=inside_e, other=0.0)
        more_mixed = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        keys = K + b * k_b + h * k_h + n[None, :] * k_n
        values = V + b * v_b + h * v_h + n[:, None] * v_n
        k = tl.load(keys + d[:, None], mask=(n[None, :] < N) & (d[:, None] < D), other=0.0)
        v = tl.load(values + d[None, :], mask=(n[:, None] < N) & (d[None, :] < D), other=0.0)
        logits = tl.dot(q, k, input_precision="ieee")
        if BLOCK_E:
            more_k = tl.load(keys + e[:, None], mask=(n[None, :] < N) & (e[:, None] < D), other=0.0)
            more_v = tl.load(values + e[None, :], mask=(n[:, None] < N) & (e[None, :] < D), other=0.0)
            logits = tl.dot(more_q, more_k, logits, input_precision="ieee")
        logits *= scale
        if HAS_SIZE:
            logits += tl.log2(tl.load(SIZE + b * N + n, mask=n < N, other=1.0))[None, :]
        if ROW:
            row = tl.sum(tl.where(m[:, None] == 0, logits, 0.0), 0)
            ours = n + N * tl.program_id(0) < N  # token 0 is in the first tile
            tl.store(LOGITS + head.to(tl.int64) * N + n, row, mask=ours)
        logits = tl.where(n[None, :] < N, logits, float("-inf"))
        higher = tl.maximum(highest, tl.max(logits, 1))
        shrink = tl.exp2(highest - higher)
        weight = tl.exp2(logits - higher[:, None])
        total = total * shrink + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
        if BLOCK_E:
            more_mixed = more_mixed * shrink[:, None]
            more_mixed = tl.dot(weight.to(v.dtype), more_v, more_mixed, input_precision="ieee")
        highest = higher
    out = OUT + ((b * N + m[:, None]) * H + h) * D
    tl.store(out + d[None, :], (mixed / total[:, None]).to(OUT.dtype.element_ty), mask=inside_m)
    if BLOCK_E:
        tl.store(out + e[None, :], (more_mixed / total[:, None]).to(OUT.dtype.element_ty), mask=inside_e)


@triton.jit(do_not_specialize=["H", "N", "prefix"])
def query_logits_kernel(
    Q, K, SIZE, LOGITS,
    q_b, q_h, q_n, k_b, k_h, k_n,
    scale, H, N, D, prefix,
    HAS_SIZE: tl.constexpr, OTHERS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The logits of one head, in base 2: the class token's, then those of OTHERS (0 or 15) image tokens."""
    head = tl.program_id(0)
    b = (head // H).to(tl.int64)
    h = head % H
    d = tl.arange(0, BLOCK_D)
    q = Q + b * q_b + h * q_h
    if OTHERS:
        r = tl.arange(0, OTHERS + 1)
        token = tl.where(r == 0, 0, prefix + (r - 1) * (N - prefix - 1) // (OTHERS - 1))
        rows = tl.load(q + token[:, None] * q_n + d[None, :], mask=d[None, :] < D, other=0.0)
    else:
        row = tl.load(q + d, mask=d < D, other=0.0).to(tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = K + b * k_b + h * k_h
        if HAS_SIZE:
            bias = tl.log2(tl.load(SIZE + b * N + n, mask=n < N, other=1.0))
        else:
            bias = tl.zeros([BLOCK_N], tl.float32)
        if OTHERS:
            inside = (n[None, :] < N) & (d[:, None] < D)
            keys = tl.load(k + n[None, :] * k_n + d[:, None], mask=inside, other=0.0)
            logits = tl.dot(rows, keys, input_precision="ieee") * scale + bias[None, :]
            where = (head.to(tl.int64) * (OTHERS + 1) + r[:, None]) * N + n[None, :]
            tl.store(LOGITS + where, logits, mask=(r[:, None] >= 0) & (n[None, :] < N))
        else:
            inside = (n[:, None] < N) & (d[None, :] < D)
            keys = tl.load(k + n[:, None] * k_n + d[None, :], mask=inside, other=0.0)
            logits = tl.sum(keys.to(tl.float32) * row[None, :], 1) * scale + bias
            tl.store(LOGITS + head.to(tl.int64) * N + n, logits, mask=n < N)


@triton.jit(do_not_specialize=["H", "N"])
def attend_training_kernel(
    Q, K, V, SIZE, OUT, LOG_SUM, LOGITS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    scale, H, N, D,
    ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """attend_kernel with all keys at once, and what attend_back_kernel needs: each row's log-sum."""
    tiles = tl.cdiv(N, BLOCK_M)
    head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    b = (head // H).to(tl.int64)
    h = head % H
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    inside_m, inside_n = (m[:, None] < N) & (d[None, :] < D), (n[:, None] < N) & (d[None, :] < D)
    q = tl.load(Q + b * q_b + h * q_h + m[:, None] * q_n + d[None, :], mask=inside_m, other=0.0)
    k = tl.load(K + b * k_b + h * k_h + n[:, None] * k_n + d[None, :], mask=inside_n, other=0.0)
    v = tl.load(V + b * v_b + h * v_h + n[:, None] * v_n + d[None, :], mask=inside_n, other=0.0)
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    logits += tl.log2(tl.load(SIZE + b * N + n, mask=n < N, other=1.0))[None, :]
    if ROW:
        row = tl.sum(tl.where(m[:, None] == 0, logits, 0.0), 0)
        tl.store(LOGITS + head.to(tl.int64) * N + n, row, mask=n + N * tile < N)
    logits = tl.where(n[None, :] < N, logits, float("-inf"))
    highest = tl.max(logits, 1)
    weight = tl.exp2(logits - highest[:, None])
    total = tl.sum(weight, 1)
    mixed = tl.dot(weight.to(v.dtype), v, input_precision="ieee") / total[:, None]
    out = OUT + ((b * N + m[:, None]) * H + h) * D + d[None, :]
    tl.store(out, mixed.to(OUT.dtype.element_ty), mask=inside_m)
    tl.store(LOG_SUM + head.to(tl.int64) * N + m, highest + tl.log2(total), mask=m < N)


@triton.jit(do_not_specialize=["H", "N"])
def attend_back_kernel(
    GRADIENT, Q, K, V, SIZE, OUT, LOG_SUM, GRAD_Q, GRAD_K, GRAD_V,
    g_b, g_h, g_n, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, to_b, to_h, to_n,
    scale, to_base_2, H, N, D,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradients of one head: all of its keys stay at hand, queries come by tiles, nothing is added up in memory."""
    head = tl.program_id(0)
    b = (head // H).to(tl.int64)
    h = head % H
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    inside_n = (n[:, None] < N) & (d[None, :] < D)
    k = tl.load(K + b * k_b + h * k_h + n[:, None] * k_n + d[None, :], mask=inside_n, other=0.0)
    v = tl.load(V + b * v_b + h * v_h + n[:, None] * v_n + d[None, :], mask=inside_n, other=0.0)
    bias = tl.log2(tl.load(SIZE + b * N + n, mask=n < N, other=1.0))
    bias = tl.where(n < N, bias, float("-inf"))
    grad_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in range(0, N, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        inside_m = (m[:, None] < N) & (d[None, :] < D)
        q = tl.load(Q + b * q_b + h * q_h + m[:, None] * q_n + d[None, :], mask=inside_m, other=0.0)
        gradient = tl.load(
            GRADIENT + b * g_b + h * g_h + m[:, None] * g_n + d[None, :], mask=inside_m, other=0.0
        )
        out = tl.load(OUT + ((b * N + m[:, None]) * H + h) * D + d[None, :], mask=inside_m, other=0.0)
        log_sum = tl.load(LOG_SUM + head.to(tl.int64) * N + m, mask=m < N, other=float("inf"))
        lost = tl.sum(gradient.to(tl.float32) * out.to(tl.float32), 1)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * to_base_2)
        weight = tl.exp2(logits + bias[None, :] - log_sum[:, None])
        grad_v = tl.dot(tl.trans(weight.to(v.dtype)), gradient, grad_v, input_precision="ieee")
        by_logit = weight * (tl.dot(gradient, tl.trans(v), input_precision="ieee") - lost[:, None])
        by_logit = by_logit.to(q.dtype)
        grad_k = tl.dot(tl.trans(by_logit), q, grad_k, input_precision="ieee")
        grad_q = tl.dot(by_logit, k, input_precision="ieee") * scale
        to = GRAD_Q + b * to_b + h * to_h + m[:, None] * to_n + d[None, :]
        tl.store(to, grad_q.to(GRAD_Q.dtype.element_ty), mask=inside_m)
    to = b * to_b + h * to_h + n[:, None] * to_n + d[None, :]
    tl.store(GRAD_K + to, (grad_k * scale).to(GRAD_K.dtype.element_ty), mask=inside_n)
    tl.store(GRAD_V + to, grad_v.to(GRAD_V.dtype.element_ty), mask=inside_n)
