"""Triton kernels that rank tokens, match and assemble them, and add what a layer made of them.

All work on one image needs no other image, so every grid is images x tiles. Scores and similarities are fp32, whatever
the features are. Token counts are plain arguments, and not special where they are 1 or a multiple of 16
(`do_not_specialize`), so that few compiled kernels serve all blocks and batches. `removal` holds what calls them;
`ranking` and `reduction` are their plain twins.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["ROWS", "N", "prefix", "QUERIES"])
def rank_kernel(
    LOGITS, PREVIOUS, IMPORTANCE, ORDER, ROWS, N, prefix, first_weight, other_weight, QUERIES, memory,
    REMEMBERS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Importance of every token of one image (softmax of each row, weighted sum over rows), and the order it gives.

    ROWS are heads x QUERIES, of which the first is the class token's.
    """
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, ROWS, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        inside = (h[:, None] < ROWS) & (n[None, :] < N)
        logits = tl.load(LOGITS + (b * ROWS + h[:, None]) * N + n[None, :], mask=inside, other=float("-inf"))
        highest = tl.where(h < ROWS, tl.max(logits, 1), 0.0)
        weight = tl.exp2(logits - highest[:, None])
        each = tl.where(h % QUERIES == 0, first_weight, other_weight)
        each = each / tl.where(h < ROWS, tl.sum(weight, 1), 1.0)
        total += tl.sum(weight * each[:, None], 0)
    importance = total
    # A model whose features overflowed gives NaN, which is neither ahead of nor behind anything.
    importance = tl.where(importance == importance, importance, 0.0)
    if REMEMBERS:
        previous = tl.load(PREVIOUS + b * N + n, mask=n < N, other=0.0)
        importance = tl.where(n < prefix, importance, (1.0 - memory) * importance + memory * previous)
    tl.store(IMPORTANCE + b * N + n, importance, mask=n < N)
    tl.store(ORDER + b * N + n, order_of(importance, n, N, prefix), mask=n < N)


@triton.jit
def order_of(score, n, N, prefix):
    """Tokens n by falling score, which is never negative; of equals the earlier one first, and the prefix before all.

    The bits of a float that is not negative grow with it: sorted together with the token's number, as one integer.
    """
    bits = score.to(tl.int32, bitcast=True).to(tl.int64)
    bits = tl.where(n < prefix, 2147483647, bits)
    key = tl.where(n < N, bits * 65536 + (65535 - n), -1)
    return (65535 - (tl.sort(key, descending=True) & 65535)).to(tl.int32)


@triton.jit(do_not_specialize=["N", "prefix"])
def order_kernel(SCORES, ORDER, N, prefix, BLOCK_N: tl.constexpr):
    """The order that the scores of one image give."""
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    score = tl.load(SCORES + b * N + n, mask=n < N, other=0.0)
    tl.store(ORDER + b * N + n, order_of(score, n, N, prefix), mask=n < N)


@triton.jit(do_not_specialize=["ROWS"])
def length_kernel(
    X, UPDATE, OUT, LENGTH, ROWS, C, ADDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """How long some tokens are; ADDS: once an update is added to them, rounded as torch does."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.arange(0, BLOCK_C)
    where = r[:, None] * C + c[None, :]
    inside = (r[:, None] < ROWS) & (c[None, :] < C)
    x = tl.load(X + where, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        rounded = (x + tl.load(UPDATE + where, mask=inside, other=0.0).to(tl.float32)).to(X.dtype.element_ty)
        tl.store(OUT + where, rounded, mask=inside)
        x = rounded.to(tl.float32)
    tl.store(LENGTH + r, tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-12), mask=r < ROWS)


@triton.jit(do_not_specialize=["N", "prefix", "TILES"])
def loss_kernel(
    X, IMPORTANCE, ORDER, LENGTH, LOSS,
    N, C, prefix, TILES, floor,
    BLOCK_A: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """What merging each token of a tile away would lose: see reduction.merging_loss.

    Tiles are cut from the order by importance: more important than a token are those before it, and no tile behind its
    own is looked at. The last tiles, which look at most, come first.
    """
    tile = TILES - 1 - tl.program_id(0) % TILES
    b = (tl.program_id(0) // TILES).to(tl.int64)
    x = X + b * N * C
    m = prefix + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = tl.load(ORDER + b * N + m, mask=m < N, other=0)
    m_length = tl.load(LENGTH + b * N + m_row, mask=m < N, other=1.0)
    nearest = tl.full([BLOCK_M], -2.0, tl.float32)  # below every cosine
    for start in range(prefix, tl.minimum(N, prefix + (tile + 1) * BLOCK_M), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        n_row = tl.load(ORDER + b * N + n, mask=n < N, other=0)
        n_length = tl.load(LENGTH + b * N + n_row, mask=n < N, other=1.0)
        product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            inside_m = (m[:, None] < N) & (c[None, :] < C)
            inside_n = (n[None, :] < N) & (c[:, None] < C)
            ours = tl.load(x + m_row[:, None] * C + c[None, :], mask=inside_m, other=0.0)
            theirs = tl.load(x + n_row[None, :] * C + c[:, None], mask=inside_n, other=0.0)
            product = tl.dot(ours, theirs, product, input_precision="tf32x3")
        cosine = product / m_length[:, None] / n_length[None, :]
        cosine = tl.where(n[None, :] < m[:, None], cosine, -2.0)
        nearest = tl.maximum(nearest, tl.max(cosine, 1))
    importance = tl.load(IMPORTANCE + b * N + m_row, mask=m < N, other=0.0)
    a = tl.arange(0, BLOCK_A)
    every = tl.load(IMPORTANCE + b * N + a, mask=(a >= prefix) & (a < N), other=0.0)
    weight = importance + floor * tl.sum(every, 0) / (N - prefix)
    loss = tl.where(nearest > -1.5, weight * (1.0 - nearest), float("inf"))
    loss = tl.where(loss == loss, tl.maximum(loss, 0.0), 0.0)
    tl.store(LOSS + b * N + m_row, loss, mask=m < N)


@triton.jit(do_not_specialize=["N", "prefix", "first", "J", "TILES"])
def match_kernel(
    X, ORDER, LENGTH, SIMILARITY, TARGET,
    N, C, prefix, first, J, TILES,
    BLOCK_J: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """For each of J joiners, from place `first` of the order on, the most similar of one tile of targets.

    Targets are the image tokens before `first`. The best of each tile are compared by assemble_kernel. The second axis
    of the grid shares out the joiners.
    """
    tile = tl.program_id(0) % TILES
    b = (tl.program_id(0) // TILES).to(tl.int64)
    x = X + b * N * C
    t = prefix + tile * BLOCK_T + tl.arange(0, BLOCK_T)
    t_row = tl.load(ORDER + b * N + t, mask=t < first, other=0)
    t_length = tl.load(LENGTH + b * N + t_row, mask=t < first, other=1.0)
    for start in range(tl.program_id(1) * BLOCK_J, J, tl.num_programs(1) * BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        j_row = tl.load(ORDER + b * N + first + j, mask=j < J, other=0)
        j_length = tl.load(LENGTH + b * N + j_row, mask=j < J, other=1.0)
        product = tl.zeros([BLOCK_J, BLOCK_T], tl.float32)
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            inside_j = (j[:, None] < J) & (c[None, :] < C)
            inside_t = (t[None, :] < first) & (c[:, None] < C)
            joiners = tl.load(x + j_row[:, None] * C + c[None, :], mask=inside_j, other=0.0)
            targets = tl.load(x + t_row[None, :] * C + c[:, None], mask=inside_t, other=0.0)
            product = tl.dot(joiners, targets, product, input_precision="tf32x3")
        cosine = product / j_length[:, None] / t_length[None, :]
        cosine = tl.where(t[None, :] < first, cosine, float("-inf"))
        best = tl.max(cosine, 1)
        target = tl.min(tl.where(cosine == best[:, None], t[None, :], N), 1)
        where = (b * TILES + tile) * J + j
        tl.store(SIMILARITY + where, best, mask=j < J)
        tl.store(TARGET + where, target, mask=j < J)


@triton.jit(do_not_specialize=["N", "prefix", "keep", "J", "TILES", "MATCH_TILES"])
def assemble_kernel(
    X, SIZE, IMPORTANCE, ORDER, LENGTH, SIMILARITY, TARGET, OUT, OUT_SIZE, LOG_SIZE, WEIGHT, BIAS, NORMED,
    OUT_IMPORTANCE, DESTINATION, SHARE,
    N, C, prefix, keep, J, TILES, MATCH_TILES, log_stride, eps,
    HAS_SIZE: tl.constexpr, JOINS: tl.constexpr, MEAN: tl.constexpr, STRETCH: tl.constexpr, NORM: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A few of the tokens that stay: gathered, averaged with what joins them, with their new sizes.

    The J tokens after the `keep` first ones join, one after the other. MEAN: 0 plain, 1 by size, 2 by importance.
    STRETCH: what they join is made as long as its longest member. NORM: also the layer norm of what stays, by WEIGHT
    and BIAS, which the MLP would otherwise read all of it again for. MAPPED: for every token that stays or joins, also
    where it went and by what share. BLOCK_C holds all features of a token.
    """
    tile = tl.program_id(0) % TILES
    b = (tl.program_id(0) // TILES).to(tl.int64)
    x = X + b * N * C
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.load(ORDER + b * N + t, mask=t < keep, other=0)
    c = tl.arange(0, BLOCK_C)
    inside = (t[:, None] < keep) & (c[None, :] < C)
    features = tl.load(x + row[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    size = tl.full([BLOCK_T], 1.0, tl.float32)
    if HAS_SIZE:
        size = tl.load(SIZE + b * N + row, mask=t < keep, other=1.0)
    weight = tl.full([BLOCK_T], 1.0, tl.float32)
    if MEAN == 1:
        weight = size
    if MEAN == 2:
        weight = tl.load(IMPORTANCE + b * N + row, mask=t < keep, other=1.0)
        weight = tl.where(t < prefix, 1.0, tl.maximum(weight, 1.1754943508222875e-38))
    stretch = tl.full([BLOCK_T], 1.0, tl.float32)
    total = weight
    if JOINS:
        j = tl.arange(0, BLOCK_J)
        k = tl.arange(0, BLOCK_K)[:, None]  # all tiles at once: one after the other, each load is waited for
        match = (b * MATCH_TILES + k) * J + j[None, :]
        found = (k < MATCH_TILES) & (j[None, :] < J)
        each = tl.load(SIMILARITY + match, mask=found, other=-2.0)  # below every cosine
        each = tl.where(each > -2.0, each, -2.0)  # and what is no number
        place = tl.load(TARGET + match, mask=found, other=0)
        similarity = tl.max(each, 0)
        place = tl.where((each == similarity[None, :]) & (each > -2.0), place, N)
        target = tl.min(place, 0)  # on a tie the earlier one
        target = tl.where(target < N, target, -1)
        pairs = target[None, :] == t[:, None]  # (BLOCK_T, BLOCK_J)
        count = tl.sum(pairs.to(tl.int32), 1)
        if STRETCH:
            longest = tl.load(LENGTH + b * N + row, mask=t < keep, other=1.0)
        at = tl.full([BLOCK_T], -1, tl.int32)
        for _ in range(tl.max(count, 0)):  # the next joiner of each token; BLOCK_J where there is none
            at = tl.min(tl.where(pairs & (j[None, :] > at[:, None]), j[None, :], BLOCK_J), 1)
            comes = at < BLOCK_J
            j_row = tl.load(ORDER + b * N + keep + at, mask=comes, other=0)
            inside_j = comes[:, None] & (c[None, :] < C)
            joiner = tl.load(x + j_row[:, None] * C + c[None, :], mask=inside_j, other=0.0).to(tl.float32)
            near = tl.sum(tl.where(j[None, :] == at[:, None], similarity[None, :], 0.0), 1)
            j_size = comes.to(tl.float32)
            if HAS_SIZE:
                j_size = tl.load(SIZE + b * N + j_row, mask=comes, other=0.0)
            j_weight = comes.to(tl.float32)
            if MEAN == 1:
                j_weight = j_size
            if MEAN == 2:
                j_weight = tl.load(IMPORTANCE + b * N + j_row, mask=comes, other=0.0)
                j_weight = tl.where(comes, tl.maximum(j_weight, 1.1754943508222875e-38), 0.0)
            if STRETCH:
                longest = tl.maximum(longest, tl.load(LENGTH + b * N + j_row, mask=comes, other=0.0))
            size += j_size * near
            before, total = total, total + j_weight
            features = features * (before / total)[:, None] + joiner * (j_weight / total)[:, None]
        size = tl.maximum(size, 1.0)
        if STRETCH:
            stretch = stretch_to(longest, tl.sum(features * features, 1), count > 0)
            features = features * stretch[:, None]
    if MEAN == 2:
        tl.store(OUT_IMPORTANCE + b * keep + t, total, mask=t < keep)
    tl.store(OUT_SIZE + b * keep + t, size, mask=t < keep)
    tl.store(LOG_SIZE + b * log_stride + t, tl.log(size).to(X.dtype.element_ty), mask=t < keep)
    where = (b * keep + t[:, None]) * C + c[None, :]
    rounded = features.to(X.dtype.element_ty)
    tl.store(OUT + where, rounded, mask=inside)
    if NORM:
        wide = rounded.to(tl.float32)
        center = tl.sum(wide, 1) / C
        apart = tl.where(c[None, :] < C, wide - center[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(apart * apart, 1) / C + eps)
        store_normed(NORMED + where, apart * scale[:, None], WEIGHT, BIAS, c, C, inside)
    if MAPPED:
        tl.store(DESTINATION + b * N + row, t, mask=t < keep)
        tl.store(SHARE + b * N + row, weight / total * stretch, mask=t < keep)
        if JOINS:
            j_row = tl.load(ORDER + b * N + keep + j, mask=j < J, other=0)
            j_weight = tl.full([BLOCK_J], 1.0, tl.float32)
            if MEAN == 1 and HAS_SIZE:
                j_weight = tl.load(SIZE + b * N + j_row, mask=j < J, other=1.0)
            if MEAN == 2:
                j_weight = tl.load(IMPORTANCE + b * N + j_row, mask=j < J, other=1.0)
                j_weight = tl.maximum(j_weight, 1.1754943508222875e-38)
            share = tl.where(pairs, j_weight[None, :] / total[:, None] * stretch[:, None], 0.0)
            comes = tl.max(pairs.to(tl.int32), 0) > 0  # to one of these tokens
            tl.store(DESTINATION + b * N + j_row, target, mask=comes)
            tl.store(SHARE + b * N + j_row, tl.sum(share, 0), mask=comes)


@triton.jit
def stretch_to(longest, squared, grows):
    """What makes a mean of this squared length as long as its longest member; 1 where that is no number."""
    longest = tl.where(longest > 1e-12, longest, 0.0)  # as lengths have it: nothing at all
    factor = longest / tl.sqrt(tl.maximum(squared, 1.1754943508222875e-38))
    return tl.where(grows & (factor < 3.4e38), factor, 1.0)


@triton.jit
def add_norm_kernel(X, UPDATE, WEIGHT, BIAS, OUT, NORMED, C, eps, BLOCK_C: tl.constexpr):
    """One token with its update added, rounded as torch does, and the layer norm of the two."""
    c = tl.arange(0, BLOCK_C)
    where = tl.program_id(0).to(tl.int64) * C + c
    x = tl.load(X + where, mask=c < C, other=0.0).to(tl.float32)
    x += tl.load(UPDATE + where, mask=c < C, other=0.0).to(tl.float32)
    rounded = x.to(X.dtype.element_ty)
    tl.store(OUT + where, rounded, mask=c < C)
    wide = rounded.to(tl.float32)
    apart = tl.where(c < C, wide - tl.sum(wide, 0) / C, 0.0)
    unit = apart * tl.rsqrt(tl.sum(apart * apart, 0) / C + eps)
    weight = tl.load(WEIGHT + c, mask=c < C, other=0.0).to(tl.float32)
    bias = tl.load(BIAS + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(NORMED + where, (unit * weight + bias).to(X.dtype.element_ty), mask=c < C)


@triton.jit
def store_normed(WHERE, unit, WEIGHT, BIAS, c, C, inside):
    """Features of mean 0 and variance 1, times the weight, and the bias."""
    weight = tl.load(WEIGHT + c, mask=c < C, other=0.0).to(tl.float32)
    bias = tl.load(BIAS + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(WHERE, (unit * weight[None, :] + bias[None, :]).to(WHERE.dtype.element_ty), mask=inside)


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
