"""The fast twins of attention, ranking and reduction, and the one place that picks them.

A block takes the fast path (`fast`) on a CUDA device with Triton, when nobody asks for a gradient or for the map from
patch to token, and for the operators that the kernels know: class attention, and pruning before merging. All else
runs as plain PyTorch: `ranking`, `reduction` and `mix` in `compressed`, which are what the kernels are tested against.

Attention itself is torch's while all tokens have size 1; its flash kernels take no bias, so that from the first merge
on it is `diffrate::attend`. `using` changes that choice, to measure it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from diffrate.backbones.base import Attention
from diffrate.errors import DiffRateError
from diffrate.kernels import ops  # noqa: F401  # registers torch.ops.diffrate
from diffrate.operator import Operator
from diffrate.reduction import candidates_from
from diffrate.tokens import Tokens

PATHS = ("auto", "triton", "sdpa", "plain")
MOST_TOKENS = 1024  # ranks come from comparing each token with each other one
HALF = (torch.float16, torch.bfloat16)
INTERPRETED = False  # tests: run the kernels on the CPU, in Triton's interpreter

_available = importlib.util.find_spec("triton") is not None
_path = "auto"


@contextmanager
def using(path: str) -> Iterator[None]:
    """Within: "auto" picks for itself; "triton" or "sdpa" mix by that attention; "plain" avoids every kernel."""
    global _path
    if path not in PATHS:
        raise DiffRateError(f"the path must be one of {', '.join(PATHS)}, not {path!r}")
    before, _path = _path, path
    try:
        yield
    finally:
        _path = before


def fast(tokens: Tokens, operator: Operator) -> bool:
    """Whether the kernels can run this block."""
    x = tokens.x
    return (
        _available
        and _path != "plain"
        and (x.is_cuda or INTERPRETED)
        and x.dtype in (*HALF, torch.float32)
        and not (torch.is_grad_enabled() and x.requires_grad)
        and tokens.patches is None
        and tokens.count <= MOST_TOKENS
        and operator.importance == "class-attention"
        and operator.operation != "merge-prune"
    )


def mix(attention: Attention, size: Tensor | None, row: bool) -> tuple[Tensor, Tensor | None]:
    """(B, heads, N, d) mixed values and, with `row`, the class token's logits (B, heads, N) in base 2."""
    q, k, v, scale, dropout = attention
    own = _path == "triton" or (_path == "auto" and size is not None)
    if own and not dropout and q.dtype in HALF and q.shape[-1] >= 16:
        mixed, logits = torch.ops.diffrate.attend(q, k, v, size, scale, row)
        return mixed, logits if row else None
    mask = None if size is None else size.log()[:, None, None].to(q.dtype)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    return mixed, torch.ops.diffrate.class_logits(q, k, size, scale) if row else None


def reduce_tokens(tokens: Tokens, logits: Tensor, prune: int, merge: int, operator: Operator) -> Tokens:
    """The twin of reduction.reduce_tokens, from the logits that `mix` gave."""
    if operator.operation != "prune-merge":
        prune = merge if operator.operation == "prune" else tokens.count
    joins = tokens.prefix < merge < prune
    first = candidates_from(prune, merge, tokens.prefix, operator.choice) if joins else merge
    x, size = torch.ops.diffrate.reduce(
        tokens.x, logits, tokens.size, tokens.prefix, prune, first, merge, operator.mean
    )
    return Tokens(x, tokens.prefix, size if joins or tokens.size is not None else None)
