"""Triton kernels of one compressed block: score, rank, match, assemble.

All work on one image needs no other image, so every grid is images x tiles. Scores and similarities are fp32, whatever
the features are. Token counts are plain arguments, and not special where they are 1 or a multiple of 16
(`do_not_specialize`), so that one compiled kernel serves every block and every batch. `ops` holds what calls them;
`ranking` and `reduction` are their plain twins.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["H", "N"])
def class_logits_kernel(
    Q, K, SIZE, LOGITS,
    q_b, q_h, k_b, k_h, k_n,
    scale, H, N, D,
    HAS_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The class token's logits of one head, in base 2."""
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
    store_order(IMPORTANCE + b * N, importance, ORDER + b * N, N, prefix, BLOCK_N, CHUNK)


@triton.jit
def store_order(SCORES, score, ORDER, N, prefix, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """Each token's number to its place in the order of falling `score`, which also lies at SCORES, never negative."""
    n = tl.arange(0, BLOCK_N)
    rank = tl.zeros([BLOCK_N], tl.int32)
    for start in range(prefix, N, CHUNK):
        j = start + tl.arange(0, CHUNK)
        other = tl.load(SCORES + j, mask=j < N, other=-1.0)
        higher = other[None, :] > score[:, None]
        earlier = (other[None, :] == score[:, None]) & (j[None, :] < n[:, None])
        rank += tl.sum((higher | earlier).to(tl.int32), 1)
    place = tl.where(n < prefix, n, prefix + rank)
    tl.store(ORDER + place, n, mask=n < N)


@triton.jit(do_not_specialize=["N", "prefix"])
def order_kernel(SCORES, ORDER, N, prefix, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """The order that the scores of one image give."""
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    score = tl.load(SCORES + b * N + n, mask=n < N, other=-1.0)
    store_order(SCORES + b * N, score, ORDER + b * N, N, prefix, BLOCK_N, CHUNK)


@triton.jit(do_not_specialize=["N", "prefix", "TILES"])
def loss_kernel(
    X, IMPORTANCE, LOSS,
    N, C, prefix, TILES, floor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """What merging each token of a tile away would lose: see reduction.merging_loss."""
    tile = tl.program_id(0) % TILES
    b = (tl.program_id(0) // TILES).to(tl.int64)
    x = X + b * N * C
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    importance = tl.load(IMPORTANCE + b * N + m, mask=m < N, other=0.0)
    nearest = tl.full([BLOCK_M], -2.0, tl.float32)  # below every cosine
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        m_square = tl.zeros([BLOCK_M], tl.float32)
        n_square = tl.zeros([BLOCK_N], tl.float32)
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            ours = tl.load(
                x + m[:, None] * C + c[None, :], mask=(m[:, None] < N) & (c[None, :] < C), other=0.0
            )
            theirs = tl.load(
                x + n[None, :] * C + c[:, None], mask=(n[None, :] < N) & (c[:, None] < C), other=0.0
            )
            product = tl.dot(ours, theirs, product, input_precision="ieee")
            wide_m = ours.to(tl.float32)
            wide_n = theirs.to(tl.float32)
            m_square += tl.sum(wide_m * wide_m, 1)
            n_square += tl.sum(wide_n * wide_n, 0)
        m_length = tl.maximum(tl.sqrt(m_square), 1e-12)
        n_length = tl.maximum(tl.sqrt(n_square), 1e-12)
        cosine = product / m_length[:, None] / n_length[None, :]
        other = tl.load(IMPORTANCE + b * N + n, mask=n < N, other=-1.0)
        tied = (other[None, :] == importance[:, None]) & (n[None, :] < m[:, None])
        above = ((other[None, :] > importance[:, None]) | tied) & (n[None, :] >= prefix) & (n[None, :] < N)
        nearest = tl.maximum(nearest, tl.max(tl.where(above, cosine, -2.0), 1))
        total += tl.where((n >= prefix) & (n < N), other, 0.0)
    weight = importance + floor * tl.sum(total, 0) / (N - prefix)
    loss = tl.where(nearest > -1.5, weight * (1.0 - nearest), float("inf"))
    loss = tl.where(loss == loss, tl.maximum(loss, 0.0), 0.0)
    tl.store(LOSS + b * N + m, loss, mask=m < N)


@triton.jit(do_not_specialize=["N", "prefix", "first", "J", "TILES"])
def match_kernel(
    X, ORDER, SIMILARITY, TARGET,
    N, C, prefix, first, J, TILES,
    BLOCK_J: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """For each of J joiners, from place `first` of the order on, the most similar of one tile of targets.

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


@triton.jit(do_not_specialize=["N", "prefix", "keep", "J", "TILES", "MATCH_TILES"])
def assemble_kernel(
    X, SIZE, IMPORTANCE, ORDER, SIMILARITY, TARGET, OUT, OUT_SIZE, DESTINATION, SHARE,
    N, C, prefix, keep, J, TILES, MATCH_TILES,
    HAS_SIZE: tl.constexpr, JOINS: tl.constexpr, MEAN: tl.constexpr, MAPPED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One tile of the tokens that stay: gathered, averaged with what joins them, with their new sizes.

    The J tokens after the `keep` first ones join. MEAN: 0 plain, 1 by size, 2 by importance. MAPPED: for every token
    that stays or joins, also where it went and by what share.
    """
    tile = tl.program_id(0) % TILES
    image = tl.program_id(0) // TILES
    b = image.to(tl.int64)
    x = X + b * N * C
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.load(ORDER + b * N + t, mask=t < keep, other=0)
    if JOINS:
        j = tl.arange(0, BLOCK_J)
        j_row = tl.load(ORDER + b * N + keep + j, mask=j < J, other=0)
        similarity = tl.full([BLOCK_J], -2.0, tl.float32)  # below every cosine
        target = tl.full([BLOCK_J], -1, tl.int32)
        for k in range(MATCH_TILES):
            where = (b * MATCH_TILES + k) * J + j
            another = tl.load(SIMILARITY + where, mask=j < J, other=-2.0)
            better = another > similarity  # on a tie the earlier tile, so the earlier target
            target = tl.where(better, tl.load(TARGET + where, mask=j < J, other=-1), target)
            similarity = tl.where(better, another, similarity)
        joins = j < J
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
        given = given / total[:, None]
        if MAPPED:
            tl.store(SHARE + b * N + row, share, mask=t < keep)
            tl.store(DESTINATION + b * N + j_row, target, mask=comes)
            tl.store(SHARE + b * N + j_row, tl.sum(given, 0), mask=comes)
        given = given.to(X.dtype.element_ty)
    elif HAS_SIZE:
        size = tl.load(SIZE + b * N + row, mask=t < keep, other=1.0)
        tl.store(OUT_SIZE + b * keep + t, size, mask=t < keep)
    else:
        tl.store(OUT_SIZE + b * keep + t, tl.full([BLOCK_T], 1.0, tl.float32), mask=t < keep)
    if MAPPED:
        tl.store(DESTINATION + b * N + row, t, mask=t < keep)
        if not JOINS:
            tl.store(SHARE + b * N + row, tl.full([BLOCK_T], 1.0, tl.float32), mask=t < keep)
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


@triton.jit(do_not_specialize=["N", "keep"])
def spread_kernel(GRADIENT, DESTINATION, SHARE, OUT, N, C, keep, BLOCK_C: tl.constexpr):
    """The gradient of one token: that of the token it went into, by its share of it."""
    row = tl.program_id(0).to(tl.int64)
    b = row // N
    place = tl.load(DESTINATION + row)
    share = tl.load(SHARE + row)
    c = tl.arange(0, BLOCK_C)
    gradient = tl.load(GRADIENT + (b * keep + place) * C + c, mask=c < C, other=0.0).to(tl.float32)
    gradient = tl.where(
        share > 0.0, gradient * share, 0.0
    )  # also where what a pruned token points to overflowed
    tl.store(OUT + row * C + c, gradient.to(GRADIENT.dtype.element_ty), mask=c < C)
