"""The fast twins of ranking and reduction, and the one place that picks them.

A block takes the fast path (`fast`) on a CUDA device with Triton, when nobody asks for the map from patch to token, and
for the operators that the kernels know: class attention, pruning before merging, and merging by cost where nothing is
pruned. All else runs as plain PyTorch, `ranking` and `reduction`, which are what the kernels are tested against. In
training the reduction also notes where each token went, which is all that its gradient needs.

Attention itself is torch's everywhere (`mixing`): on an H200 cuDNN's with a bias was faster than kernels of our own.
`using` changes the choice, to measure it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from diffrate.backbones.base import Attention
from diffrate.errors import DiffRateError
from diffrate.kernels import ops  # noqa: F401  # registers torch.ops.diffrate
from diffrate.operator import Operator
from diffrate.tokens import Tokens

PATHS = ("auto", "plain")
MOST_TOKENS = 1024  # ranks come from comparing each token with each other one
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED = False  # tests: run the kernels on the CPU, in Triton's interpreter

_available = importlib.util.find_spec("triton") is not None
_path = "auto"


@contextmanager
def using(path: str) -> Iterator[None]:
    """Within: "auto" picks for itself; "plain" avoids every kernel."""
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
        and x.dtype in DTYPES
        and tokens.patches is None
        and tokens.positions is None
        and tokens.count <= MOST_TOKENS
        and operator.importance == "class-attention"
        and operator.operation != "merge-prune"
        and (operator.choice == "rank" or operator.operation == "merge")
    )


def class_logits(attention: Attention, size: Tensor | None) -> Tensor:
    """(B, heads, N) logits of the class token in base 2, with the bias of the sizes."""
    q, k = attention.q.detach(), attention.k.detach()  # a choice of tokens has no gradient
    logits: Tensor = torch.ops.diffrate.class_logits(q, k, size, attention.scale)
    return logits


def reduce_tokens(tokens: Tokens, logits: Tensor, prune: int, merge: int, operator: Operator) -> Tokens:
    """The twin of reduction.reduce_tokens, from the class token's logits (B, heads, N) in base 2."""
    if operator.operation != "prune-merge":
        prune = merge if operator.operation == "prune" else tokens.count
    joins = tokens.prefix < merge < prune
    learning = torch.is_grad_enabled() and tokens.x.requires_grad
    reduce = torch.ops.diffrate.reduce_mapped if learning else torch.ops.diffrate.reduce
    x, size, *_ = reduce(
        tokens.x, logits, tokens.size, tokens.prefix, prune, merge, operator.mean,
        joins and operator.choice == "cost", operator.floor,
    )  # fmt: skip
    return replace(tokens, x=x, size=size.detach() if joins or tokens.size is not None else None)
