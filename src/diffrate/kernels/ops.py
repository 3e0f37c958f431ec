"""The Triton kernels as operators of torch, so that compile, export and CUDA graphs see one opaque step each.

    diffrate::attend           attention, and the class token's logits, for few images
    diffrate::attend_training  attention of few tokens in training, with such logits
    diffrate::attend_back      its gradient
    diffrate::query_logits     logits of the queries that rank: a few rows, where attention itself is torch's
    diffrate::rank             importance and order of the tokens, from those logits
    diffrate::reduce           match and assemble: tokens in, fewer tokens out, and the norm behind them
    diffrate::reduce_mapped    the same without the norm, and where each token went: so its gradient is one gather
    diffrate::spread           that gather

`add_norm` and `add_measured`, a sum with its norm or its length, are only called directly: a compiler fuses the two by
itself. Logits have base 2. Of gradients there are those of the features; logits and sizes have none, as in `reduction`.
"""

from diffrate.kernels.attention import (
    MOST_KEYS,
    attend,
    attend_back,
    attend_training,
    query_logits,
)
from diffrate.kernels.removal import (
    add_measured,
    add_norm,
    lengths,
    match,
    rank,
    reduce,
    reduce_mapped,
    spread,
)

__all__ = [
    "MOST_KEYS",
    "add_measured",
    "add_norm",
    "attend",
    "attend_back",
    "attend_training",
    "lengths",
    "match",
    "query_logits",
    "rank",
    "reduce",
    "reduce_mapped",
    "spread",
]
