"""Triton kernels of one compressed block: attend, score, rank, match, assemble.

All work on one image needs no other image, so every grid is images x tiles. Scores and similarities are fp32, whatever
the features are. Token counts are plain arguments, and not special where they are 1 or a multiple of 16
(`do_not_specialize`), so that one compiled kernel serves every block and every batch. `ops` holds what calls them;
`ranking` and `reduction` are their plain twins.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["H", "N", "TILES"])
def attend_kernel(
    Q, K, V, SIZE, OUT, LOGITS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    scale, H, N, D, TILES,
    HAS_SIZE: tl.constexpr, ROW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    """softmax(q k^T * scale + log size) v for one tile of queries of one head, in one pass over the keys.

    scale comes multiplied by log2(e): exponentials and logarithms here have base 2. Head widths that are no power of
    two are split in two parts (80 = 64 + 16), which wastes less than padding. With ROW the tile that holds the class
    token also writes its logits: the ranking needs that one row, and nothing else of the matrix leaves the chip.
    """
    tile = tl.program_id(0) % TILES
    head = tl.program_id(0) // TILES
    b = (head // H).to(tl.int64)
    h = head % H
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d0 = tl.arange(0, D0)
    q_row = Q + b * q_b + h * q_h + m[:, None] * q_n
    k_head = K + b * k_b + h * k_h
    v_head = V + b * v_b + h * v_h
    q0 = tl.load(q_row + d0[None, :], mask=m[:, None] < N, other=0.0)
    acc0 = tl.zeros([BLOCK_M, D0], tl.float32)
    if D1 > 0:
        d1 = D0 + tl.arange(0, D1)
        q1 = tl.load(q_row + d1[None, :], mask=(m[:, None] < N) & (d1[None, :] < D), other=0.0)
        acc1 = tl.zeros([BLOCK_M, D1], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k0 = tl.load(k_head + n[None, :] * k_n + d0[:, None], mask=n[None, :] < N, other=0.0)
        logits = tl.dot(q0, k0, input_precision="ieee")
        if D1 > 0:
            inside = (n[None, :] < N) & (d1[:, None] < D)
            k1 = tl.load(k_head + n[None, :] * k_n + d1[:, None], mask=inside, other=0.0)
            logits = tl.dot(q1, k1, logits, input_precision="ieee")
        logits = logits * scale
        if HAS_SIZE:
            size = tl.load(SIZE + b * N + n, mask=n < N, other=1.0)
            logits = logits + tl.log2(size)[None, :]
        if ROW:  # noqa: SIM102  # a constant, and only then a condition of the program
            if tile == 0:
                where = LOGITS + head.to(tl.int64) * N + n[None, :] + 0 * m[:, None]
                tl.store(where, logits, mask=(m[:, None] == 0) & (n[None, :] < N))
        logits = tl.where(n[None, :] < N, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        weight = tl.exp2(logits - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weight, 1)
        top = new_top
        v0 = tl.load(v_head + n[:, None] * v_n + d0[None, :], mask=n[:, None] < N, other=0.0)
        weight = weight.to(v0.dtype)
        acc0 = tl.dot(weight, v0, acc0 * fade[:, None], input_precision="ieee")
        if D1 > 0:
            inside = (n[:, None] < N) & (d1[None, :] < D)
            v1 = tl.load(v_head + n[:, None] * v_n + d1[None, :], mask=inside, other=0.0)
            acc1 = tl.dot(weight, v1, acc1 * fade[:, None], input_precision="ieee")
    out_row = OUT + ((b * N + m[:, None]) * H + h) * D  # (B, N, heads, d): what the output projection reads
    acc0 = acc0 / total[:, None]
    tl.store(out_row + d0[None, :], acc0.to(OUT.dtype.element_ty), mask=m[:, None] < N)
    if D1 > 0:
        acc1 = acc1 / total[:, None]
        inside = (m[:, None] < N) & (d1[None, :] < D)
        tl.store(out_row + d1[None, :], acc1.to(OUT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["H", "N"])
def class_logits_kernel(
    Q, K, SIZE, LOGITS,
    q_b, q_h, k_b, k_h, k_n,
    scale, H, N, D,
    HAS_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The class token's logits of one head, in base 2: the row that attend_kernel writes on its way."""
    head = tl.program_id(0)
    b = (head // H).to(tl.int64)
    h = head % H
    d = tl.arange(0, BLOCK_D)
    q = tl.load(Q + b * q_b + h * q_h + d, mask=d < D, other=0.0).to(tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = (n[:, None] < N) & (d[None, :] < D)
        k = tl.load(K + b * k_b + h * k_h + n[:, None] * k_n + d[None, :], mask=inside, other=0.0)
        logits = tl.sum(k.to(tl.float32) * q[None, :], 1) * scale
        if HAS_SIZE:
            logits = logits + tl.log2(tl.load(SIZE + b * N + n, mask=n < N, other=1.0))
        tl.store(LOGITS + head.to(tl.int64) * N + n, logits, mask=n < N)


@triton.jit(do_not_specialize=["H", "N", "prefix"])
def rank_kernel(
    LOGITS, IMPORTANCE, ORDER, H, N, prefix, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Importance of every token of one image (softmax of each head's row, mean over heads), and the order it gives.

    A token's rank is the number of tokens ahead of it: more important, or as important and earlier.
    """
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for h in range(H):
        logits = tl.load(LOGITS + (b * H + h) * N + n, mask=n < N, other=float("-inf"))
        weight = tl.exp2(logits - tl.max(logits, 0))
        total = total + weight / tl.sum(weight, 0)
    importance = total / H
    # A model whose features overflowed gives NaN, which is neither ahead of nor behind anything: ranks would collide.
    importance = tl.where(importance == importance, importance, 0.0)
    tl.store(IMPORTANCE + b * N + n, importance, mask=n < N)
    tl.debug_barrier()  # what one thread stored, all compare with
    rank = tl.zeros([BLOCK_N], tl.int32)
    for start in range(prefix, N, CHUNK):
        j = start + tl.arange(0, CHUNK)
        other = tl.load(IMPORTANCE + b * N + j, mask=j < N, other=-1.0)
        higher = other[None, :] > importance[:, None]
        earlier = (other[None, :] == importance[:, None]) & (j[None, :] < n[:, None])
        rank += tl.sum((higher | earlier).to(tl.int32), 1)
    place = tl.where(n < prefix, n, prefix + rank)
    tl.store(ORDER + b * N + place, n, mask=n < N)


@triton.jit(do_not_specialize=["N", "prefix", "first", "J", "TILES"])
def match_kernel(
    X, ORDER, SIMILARITY, TARGET,
    N, C, prefix, first, J, TILES,
    BLOCK_J: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """For each of J candidates, from place `first` of the order on, the most similar of one tile of targets.

    Targets are the image tokens before `first`. The best of each tile are compared by assemble_kernel.
    """
    tile = tl.program_id(0) % TILES
    image = tl.program_id(0) // TILES
    b = image.to(tl.int64)
    x = X + b * N * C
    t = prefix + tile * BLOCK_T + tl.arange(0, BLOCK_T)
    t_row = tl.load(ORDER + b * N + t, mask=t < first, other=0)
    for start in range(0, J, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        j_row = tl.load(ORDER + b * N + first + j, mask=j < J, other=0)
        product = tl.zeros([BLOCK_J, BLOCK_T], tl.float32)
        j_square = tl.zeros([BLOCK_J], tl.float32)
        t_square = tl.zeros([BLOCK_T], tl.float32)
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            inside_j = (j[:, None] < J) & (c[None, :] < C)
            inside_t = (t[None, :] < first) & (c[:, None] < C)
            joiners = tl.load(x + j_row[:, None] * C + c[None, :], mask=inside_j, other=0.0)
            targets = tl.load(x + t_row[None, :] * C + c[:, None], mask=inside_t, other=0.0)
            product = tl.dot(joiners, targets, product, input_precision="ieee")
            wide_j = joiners.to(tl.float32)
            wide_t = targets.to(tl.float32)
            j_square += tl.sum(wide_j * wide_j, 1)
            t_square += tl.sum(wide_t * wide_t, 0)
        j_length = tl.maximum(tl.sqrt(j_square), 1e-12)
        t_length = tl.maximum(tl.sqrt(t_square), 1e-12)
        cosine = product / j_length[:, None] / t_length[None, :]
        cosine = tl.where(t[None, :] < first, cosine, float("-inf"))
        best = tl.max(cosine, 1)
        target = tl.min(tl.where(cosine == best[:, None], t[None, :], N), 1)
        where = (b * TILES + tile) * J + j
        tl.store(SIMILARITY + where, best, mask=j < J)
        tl.store(TARGET + where, target, mask=j < J)


@triton.jit(do_not_specialize=["N", "prefix", "first", "keep", "J", "TILES", "MATCH_TILES"])
def assemble_kernel(
    X, SIZE, IMPORTANCE, ORDER, SIMILARITY, TARGET, OUT, OUT_SIZE,
    N, C, prefix, first, keep, J, TILES, MATCH_TILES,
    HAS_SIZE: tl.constexpr, JOINS: tl.constexpr, SPARES: tl.constexpr, MEAN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One tile of the tokens that stay: gathered, averaged with what joins them, with their new sizes.

    Of the J candidates the `keep - first` that would lose most by joining (SPARES) stay instead, at places from
    `first` on; the others join. MEAN: 0 plain, 1 by size, 2 by importance.
    """
    tile = tl.program_id(0) % TILES
    image = tl.program_id(0) // TILES
    b = image.to(tl.int64)
    x = X + b * N * C
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.load(ORDER + b * N + t, mask=(t < keep) & (t < first), other=0)
    if JOINS:
        j = tl.arange(0, BLOCK_J)
        j_row = tl.load(ORDER + b * N + first + j, mask=j < J, other=0)
        similarity = tl.full([BLOCK_J], -2.0, tl.float32)  # below every cosine
        target = tl.full([BLOCK_J], -1, tl.int32)
        for k in range(MATCH_TILES):
            where = (b * MATCH_TILES + k) * J + j
            another = tl.load(SIMILARITY + where, mask=j < J, other=-2.0)
            better = another > similarity  # on a tie the earlier tile, so the earlier target
            target = tl.where(better, tl.load(TARGET + where, mask=j < J, other=-1), target)
            similarity = tl.where(better, another, similarity)
        joins = j < J
        if SPARES:
            j_importance = tl.load(IMPORTANCE + b * N + j_row, mask=j < J, other=0.0)
            loss = j_importance * (1.0 - similarity)
            loss = tl.where(loss == loss, loss, 0.0)
            loss = tl.where(j < J, loss, float("-inf"))
            higher = loss[None, :] > loss[:, None]
            earlier = (loss[None, :] == loss[:, None]) & (j[None, :] < j[:, None])
            place = first + tl.sum((higher | earlier).to(tl.int32), 1)
            joins = joins & (place >= keep)
            here = (place[None, :] == t[:, None]) & (j[None, :] < J)
            row = row + tl.sum(tl.where(here, j_row[None, :], 0), 1)
        pairs = joins[None, :] & (target[None, :] == t[:, None])  # (BLOCK_T, BLOCK_J)
        if HAS_SIZE:
            size = tl.load(SIZE + b * N + row, mask=t < keep, other=1.0)
            j_size = tl.load(SIZE + b * N + j_row, mask=j < J, other=1.0)
        else:
            size = tl.full([BLOCK_T], 1.0, tl.float32)
            j_size = tl.full([BLOCK_J], 1.0, tl.float32)
        grown = size + tl.sum(tl.where(pairs, (j_size * similarity)[None, :], 0.0), 1)
        tl.store(OUT_SIZE + b * keep + t, tl.maximum(grown, 1.0), mask=t < keep)
        if MEAN == 0:
            weight = tl.full([BLOCK_T], 1.0, tl.float32)
            j_weight = tl.full([BLOCK_J], 1.0, tl.float32)
        elif MEAN == 1:
            weight = size
            j_weight = j_size
        else:
            weight = tl.load(IMPORTANCE + b * N + row, mask=t < keep, other=1.0)
            weight = tl.where(t < prefix, 1.0, tl.maximum(weight, 1.1754943508222875e-38))
            j_weight = tl.load(IMPORTANCE + b * N + j_row, mask=j < J, other=1.0)
            j_weight = tl.maximum(j_weight, 1.1754943508222875e-38)
        given = tl.where(pairs, j_weight[None, :], 0.0)
        total = weight + tl.sum(given, 1)
        comes = tl.max(pairs.to(tl.int32), 0) > 0  # whose features this tile needs
        grows = tl.max(pairs.to(tl.int32), 1) > 0
        share = tl.where(grows, weight / total, 1.0)
        given = (given / total[:, None]).to(X.dtype.element_ty)
    elif HAS_SIZE:
        size = tl.load(SIZE + b * N + row, mask=t < keep, other=1.0)
        tl.store(OUT_SIZE + b * keep + t, size, mask=t < keep)
    else:
        tl.store(OUT_SIZE + b * keep + t, tl.full([BLOCK_T], 1.0, tl.float32), mask=t < keep)
    for c0 in range(0, C, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        inside = (t[:, None] < keep) & (c[None, :] < C)
        features = tl.load(x + row[:, None] * C + c[None, :], mask=inside, other=0.0)
        if JOINS:
            inside_j = comes[:, None] & (c[None, :] < C)
            joiners = tl.load(x + j_row[:, None] * C + c[None, :], mask=inside_j, other=0.0)
            mean = features.to(tl.float32) * share[:, None]
            mean = tl.dot(given, joiners, mean, input_precision="ieee")
            features = mean.to(X.dtype.element_ty)
        tl.store(OUT + (b * keep + t[:, None]) * C + c[None, :], features, mask=inside)
