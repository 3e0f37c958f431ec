"""The Triton kernels as operators of torch, so that compile, export and CUDA graphs see one opaque step each.

    diffrate::attend        attention with sizes, and the class token's logits on the way
    diffrate::class_logits  those logits alone, where attention itself is torch's
    diffrate::reduce        rank, match and assemble: tokens in, fewer tokens out

Logits have base 2. None of them has a gradient; `diffrate.kernels` picks them only where none is asked for.
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


def attention_tiles(n: int, d: int) -> dict[str, int]:
    """Tile sizes of attend_kernel: 64 queries a program, fewer where there are fewer."""
    rows = 64 if n > 32 else 32 if n > 16 else 16
    return {"BLOCK_M": rows, "BLOCK_N": rows, "num_warps": 4, "num_stages": 2}


def attend(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor | None, scale: float, row: bool
) -> tuple[Tensor, Tensor]:
    """(B, heads, N, d) mixed values and, with `row`, (B, heads, N) logits of the first query; else an empty tensor."""
    return attend_with(q, k, v, size, scale, row, attention_tiles(q.shape[2], q.shape[3]))


def attend_with(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor | None, scale: float, row: bool, tiles: dict[str, int]
) -> tuple[Tensor, Tensor]:
    """attend, with given tile sizes."""
    q, k, v = (_rows_dense(t) for t in (q, k, v))
    b, heads, n, d = q.shape
    out, logits = _attend_outputs(q, k, v, size, scale, row)
    main = 1 << (d.bit_length() - 1)  # the largest power of two in d
    rest = _power_of_two(d - main) if d > main else 0
    count = _tiles(n, tiles["BLOCK_M"])
    if b:
        kernels().attend_kernel[(count * b * heads,)](
            q, k, v, size if size is not None else q, out, logits,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            scale * LOG2_E, heads, n, d, count,
            HAS_SIZE=size is not None, ROW=row, D0=main, D1=rest, **tiles,
        )  # fmt: skip
    return out, logits


def _attend_outputs(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor | None, scale: float, row: bool
) -> tuple[Tensor, Tensor]:
    b, heads, n, d = q.shape
    out = q.new_empty((b, n, heads, d)).transpose(1, 2)
    return out, q.new_empty((b, heads, n) if row else (0,), dtype=torch.float32)


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
    x: Tensor, logits: Tensor, size: Tensor | None, prefix: int, prune: int, first: int, keep: int, mean: str
) -> tuple[Tensor, Tensor]:
    """(B, keep, C) tokens and (B, keep) sizes: see reduction.reduce_tokens.

    prune  tokens that pruning leaves. Of those, the ones ranked from `first` on are candidates to join the image
           tokens before them; `keep - first` candidates, those that would lose most, are spared.
    """
    x = x.contiguous()
    with step("ranking"):
        importance, order = rank(logits, prefix)
    with step("merge"):
        return _assemble(x, importance, order, size, prefix, prune, first, keep, mean)


def _assemble(
    x: Tensor,
    importance: Tensor,
    order: Tensor,
    size: Tensor | None,
    prefix: int,
    prune: int,
    first: int,
    keep: int,
    mean: str,
) -> tuple[Tensor, Tensor]:
    """Match the candidates, and write what stays."""
    joins = prune > keep and first > prefix
    b, n, c = x.shape
    candidates = prune - first if joins else 0
    similarity, target = match(x, order, prefix, first, candidates)
    out, out_size = _reduce_outputs(x, importance, size, prefix, prune, first, keep, mean)
    rows = _token_tile(b, keep)
    count = _tiles(keep, rows)
    if b:
        kernels().assemble_kernel[(count * b,)](
            x, size if size is not None else x, importance, order, similarity, target, out, out_size,
            n, c, prefix, first if joins else keep, keep, candidates, count, similarity.shape[1],
            HAS_SIZE=size is not None, JOINS=joins, SPARES=joins and keep > first, MEAN=MEANS[mean],
            BLOCK_T=rows, BLOCK_J=_power_of_two(candidates), BLOCK_C=64, num_warps=8 if candidates > 64 else 4,
        )  # fmt: skip
    return out, out_size


def _reduce_outputs(
    x: Tensor, logits: Tensor, size: Tensor | None, prefix: int, prune: int, first: int, keep: int, mean: str
) -> tuple[Tensor, Tensor]:
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


def match(x: Tensor, order: Tensor, prefix: int, first: int, candidates: int) -> tuple[Tensor, Tensor]:
    """(B, tiles, J) highest cosine similarity of each candidate in each tile of targets, and the target's place."""
    b, n, c = x.shape
    rows = _token_tile(b, first - prefix)
    count = _tiles(first - prefix, rows) if candidates else 0
    similarity = x.new_empty((b, count, candidates), dtype=torch.float32)
    target = x.new_empty((b, count, candidates), dtype=torch.int32)
    if b and candidates:
        kernels().match_kernel[(count * b,)](
            x, order, similarity, target, n, c, prefix, first, candidates, count,
            BLOCK_J=min(64, _power_of_two(candidates)), BLOCK_T=rows, BLOCK_C=64, num_warps=4,
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
    "attend(Tensor q, Tensor k, Tensor v, Tensor? size, float scale, bool row) -> (Tensor, Tensor)",
    attend,
    _attend_outputs,
)
_register(
    "class_logits(Tensor q, Tensor k, Tensor? size, float scale) -> Tensor",
    class_logits,
    _class_logits_output,
)
_register(
    "reduce(Tensor x, Tensor logits, Tensor? size, int prefix, int prune, int first, int keep, str mean)"
    " -> (Tensor, Tensor)",
    reduce,
    _reduce_outputs,
)
