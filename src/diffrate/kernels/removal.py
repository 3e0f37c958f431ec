"""Operators that rank, remove and add: see ops."""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffrate.kernels.operators import (
    MANY,
    library,
    on_its_device,
    or_any,
    power_of_two,
    register,
    tiles,
)
from diffrate.steps import step

MEANS = {"plain": 0, "size": 1, "attention": 2}


@functools.cache
def kernels() -> Any:
    """The module of kernels; imported with the first one that runs, because Triton takes a second to load."""
    return importlib.import_module("diffrate.kernels.removal_kernels")


@on_its_device
def rank(
    logits: Tensor, prefix: int, image_share: float, previous: Tensor | None = None, memory: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(B, N) importance and (B, N) token indices in its order, prefix first, from (B, heads, R, N) logits.

    previous  (B, N) what it was before, of which `memory` is the share.
    """
    b, heads, queries, n = logits.shape
    importance, order = _rank_outputs(logits)
    if b:
        width = power_of_two(n)
        share = image_share if queries > 1 else 0.0
        kernels().rank_kernel[(b,)](
            logits, or_any(previous, logits), importance, order, heads * queries, n, prefix,
            (1 - share) / heads, share / heads / max(queries - 1, 1), queries, float(memory),
            REMEMBERS=previous is not None,
            BLOCK_H=min(16, power_of_two(heads * queries, least=2)), BLOCK_N=width, num_warps=max(4, width // 64),
        )  # fmt: skip
    return importance, order


def _rank_outputs(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    b, n = logits.shape[0], logits.shape[-1]
    return logits.new_empty((b, n)), logits.new_empty((b, n), dtype=torch.int32)


class Removal(NamedTuple):
    """What a reduction is told beside its tokens.

    importance  (B, N), and order (B, N), token indices by it.
    length   (B, N) how long tokens are; None where they are to be measured, if anything joins.
    prune    tokens that pruning leaves; those ranked from `keep` on join the image tokens before them.
    by_cost  ranked by what merging them would lose, of all tokens, and not by their importance.
    keep_norm  whether what others join is made as long as its longest member.
    """

    importance: Tensor
    order: Tensor
    size: Tensor | None
    length: Tensor | None
    prefix: int
    prune: int
    keep: int
    mean: str
    by_cost: bool
    floor: float
    keep_norm: bool


Kept = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Affine(NamedTuple):
    """A layer norm; without a weight there is none."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0


@on_its_device
def reduce(x: Tensor, *given: Any) -> Kept:
    """(B, keep, C) tokens, (B, keep) sizes and their logarithms, the tokens' layer norm, and their importance.

    The norm is empty without an Affine; the importance, that of a token's members together, for means without one.
    The twin of reduction.reduce_tokens. Given are the fields of a Removal and, for the norm, of an Affine.
    Logarithms have the features' type and rows of whole 16 bytes, as attention wants its bias.
    """
    removal, affine = _split(given)
    kept = _kept(x, removal, affine.weight)
    _reduce(x, removal, kept, affine, None)
    return kept


@on_its_device
def reduce_mapped(x: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens, sizes, their logarithms and importance; (B, N) where each token went, and by what share: 0 for none."""
    removal, affine = _split(given)
    kept, places = _kept(x, removal, None), _map(x)
    _reduce(x, removal, kept, affine, places)
    return _without_norm(kept, places)


def _split(given: tuple[Any, ...]) -> tuple[Removal, Affine]:
    fields = len(Removal._fields)
    return Removal(*given[:fields]), Affine(*given[fields:])


def _reduce_outputs(x: Tensor, *given: Any) -> Kept:
    removal, affine = _split(given)
    return _kept(x, removal, affine.weight)


def _reduce_mapped_outputs(x: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _without_norm(_kept(x, _split(given)[0], None), _map(x))


def _without_norm(
    kept: Kept, places: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return *kept[:3], kept[4], *places


def _reduce(
    x: Tensor,
    removal: Removal,
    kept: Kept,
    affine: Affine,
    places: tuple[Tensor, Tensor] | None,
) -> None:
    """Fill `kept` and, where they are wanted, the places that tokens went to."""
    x = x.contiguous()
    importance, order, size, length, prefix, prune, keep, mean, by_cost, floor, keep_norm = removal
    out, out_size, log_size, normed, out_importance = kept
    weight, bias, eps = affine
    joins = prune > keep > prefix
    joining = prune - keep if joins else 0
    length = lengths(x) if joins and length is None else or_any(length, importance).contiguous()
    if by_cost:
        with step("ranking"):
            order = rank_by_cost(x, importance, order, length, prefix, floor)
    with step("merge"):
        b, n, c = x.shape
        similarity, target = match(x, order, length, prefix, keep, joining)
        destination, share = (order, importance) if places is None else places
        width, joiners = power_of_two(c), power_of_two(joining)
        found = power_of_two(similarity.shape[1], least=16 if b < MANY else 4)
        rows, warps = _assembly(b, width, joining, joiners * found)
        count = tiles(keep, rows)
        if b:
            kernels().assemble_kernel[(count * b,)](
                x, or_any(size, x), importance, order, length, similarity, target, out, out_size, log_size,
                or_any(weight, x), or_any(bias, x), normed, out_importance, destination, share,
                n, c, prefix, keep, joining, count, similarity.shape[1], log_size.stride(0), eps,
                HAS_SIZE=size is not None, JOINS=joins, MEAN=MEANS[mean], STRETCH=joins and keep_norm,
                NORM=weight is not None, MAPPED=places is not None,
                BLOCK_T=rows, BLOCK_J=joiners, BLOCK_K=found, BLOCK_C=width, num_warps=warps,
            )  # fmt: skip


def _assembly(batch: int, width: int, joining: int, matches: int) -> tuple[int, int]:
    """Tokens that one program assembles, and its warps, which share out `width` features and all `matches`.

    What joins comes one after the other, so that tokens wait for those beside them: one at a time, where many join.
    """
    least = min(8, max(1, width // 1024, matches // 1024))
    if batch < MANY:
        return 1, max(4, least)
    return (4, max(2, least)) if width <= 256 and joining <= 16 else (1, least)


def add_measured(x: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
    """x + update (B, N, C), and (B, N) how long that is."""
    return _measured(x, update)


def lengths(x: Tensor) -> Tensor:
    """(B, N) how long tokens (B, N, C) are."""
    return _measured(x, None)[1]


@on_its_device
def _measured(x: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
    x, update = x.contiguous(), update if update is None else update.contiguous()
    b, n, c = x.shape
    out = x if update is None else torch.empty_like(x)
    length = x.new_empty((b, n), dtype=torch.float32)
    if b * n:
        rows = max(1, min(8, 4096 // power_of_two(c)))
        kernels().length_kernel[(tiles(b * n, rows),)](
            x, or_any(update, x), out, length, b * n, c,
            ADDS=update is not None, BLOCK_R=rows, BLOCK_C=power_of_two(c), num_warps=4,
        )  # fmt: skip
    return out, length


@on_its_device
def add_norm(x: Tensor, update: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + update (B, N, C) and its layer norm."""
    x, update = x.contiguous(), update.contiguous()
    b, n, c = x.shape
    out, normed = torch.empty_like(x), torch.empty_like(x)
    if b * n:
        width = power_of_two(c)
        kernels().add_norm_kernel[(b * n,)](
            x, update, weight, bias, out, normed, c, eps, BLOCK_C=width, num_warps=max(1, min(8, width // 256)),
        )  # fmt: skip
    return out, normed


def _map(x: Tensor) -> tuple[Tensor, Tensor]:
    """Room for where each token went and by what share: nowhere, before a kernel writes it."""
    return x.new_zeros(x.shape[:2], dtype=torch.int32), x.new_zeros(x.shape[:2], dtype=torch.float32)


@on_its_device
def spread(gradient: Tensor, destination: Tensor, share: Tensor) -> Tensor:
    """(B, N, C) gradient of the tokens that a reduction got, from the (B, keep, C) of those that it gave."""
    gradient = gradient.contiguous()
    b, keep, c = gradient.shape
    n = destination.shape[1]
    out = _spread_output(gradient, destination, share)
    if b:
        kernels().spread_kernel[(b * n,)](
            gradient, destination, share, out, n, c, keep, BLOCK_C=power_of_two(c), num_warps=4
        )
    return out


def _spread_output(gradient: Tensor, destination: Tensor, share: Tensor) -> Tensor:
    b, n = destination.shape
    return gradient.new_empty((b, n, gradient.shape[2]))


def _remember_map(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[-2:])


def _spread_back(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return torch.ops.diffrate.spread(gradient, *ctx.saved_tensors), *([None] * len(Removal._fields))


def _kept(x: Tensor, removal: Removal, weight: Tensor | None) -> Kept:
    """Room for what is kept of each image: tokens, sizes and logarithms of sizes, the tokens' norm and importance."""
    (b, _, c), keep = x.shape, removal.keep
    return (
        x.new_empty((b, keep, c)),
        x.new_empty((b, keep), dtype=torch.float32),
        x.new_empty((b, keep + -keep % 8))[:, :keep],
        x.new_empty((b, keep if weight is not None else 0, c)),
        x.new_empty((b, keep if removal.mean == "attention" else 0), dtype=torch.float32),
    )


def rank_by_cost(
    x: Tensor, importance: Tensor, order: Tensor, length: Tensor, prefix: int, floor: float
) -> Tensor:
    """(B, N) token indices in the order of what merging each away would lose, prefix first.

    importance, order, length  as a Removal has them.
    """
    b, n, c = x.shape
    loss, by_loss = torch.empty_like(importance), torch.empty_like(order)
    rows, width = _token_tile(b, n - prefix), power_of_two(n)
    count = tiles(n - prefix, rows)
    if b:
        kernels().loss_kernel[(count * b,)](
            x, importance, order, length, loss, n, c, prefix, count, float(floor),
            BLOCK_A=width, BLOCK_M=rows, BLOCK_N=128 if b < MANY else 64, BLOCK_C=64, num_warps=4, num_stages=3,
        )  # fmt: skip
        kernels().order_kernel[(b,)](loss, by_loss, n, prefix, BLOCK_N=width, num_warps=max(4, width // 64))
    return by_loss


def match(
    x: Tensor, order: Tensor, length: Tensor, prefix: int, first: int, joining: int
) -> tuple[Tensor, Tensor]:
    """(B, tiles, J) highest cosine similarity of each joiner in each tile of targets, and the target's place."""
    b, n, c = x.shape
    rows = _token_tile(b, first - prefix)
    count = tiles(first - prefix, rows) if joining else 0
    similarity = x.new_empty((b, count, joining), dtype=torch.float32)
    target = x.new_empty((b, count, joining), dtype=torch.int32)
    if b and joining:
        few = b < MANY  # which wait for their loads: ask for many at once, in more programs
        width = 16 if few else min(64, power_of_two(joining))
        kernels().match_kernel[(count * b, tiles(joining, width) if few else 1)](
            x, order, length, similarity, target, n, c, prefix, first, joining, count,
            BLOCK_J=width, BLOCK_T=rows, BLOCK_C=256 if few else 64, num_warps=4, num_stages=1 if few else 3,
        )  # fmt: skip
    return similarity, target


def _token_tile(batch: int, tokens: int) -> int:
    """Tokens a program works on: many where there are images enough to fill a GPU, else few."""
    return min(64 if batch >= MANY else 16, power_of_two(tokens))


register(
    "rank(Tensor logits, int prefix, float image_share, Tensor? previous=None, float memory=0.0) -> (Tensor, Tensor)",
    rank,
    _rank_outputs,
)
register(
    "reduce(Tensor x, Tensor importance, Tensor order, Tensor? size, Tensor? length, int prefix, int prune, int keep,"
    " str mean, bool by_cost, float floor, bool keep_norm, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reduce,
    _reduce_outputs,
)
register(
    "reduce_mapped(Tensor x, Tensor importance, Tensor order, Tensor? size, Tensor? length, int prefix, int prune,"
    " int keep, str mean, bool by_cost, float floor, bool keep_norm)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reduce_mapped,
    _reduce_mapped_outputs,
)
register(
    "spread(Tensor gradient, Tensor destination, Tensor share) -> Tensor",
    spread,
    _spread_output,
)
torch.library.register_autograd(
    "diffrate::reduce_mapped", _spread_back, setup_context=_remember_map, lib=library
)
