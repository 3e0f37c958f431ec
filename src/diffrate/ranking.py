"""Importance of image tokens (paper 4.1, eq. 5, and the metrics of its ablation).

Every function takes the queries, keys and values of one block, (B, heads, N, d), and returns (B, N - prefix) scores
in fp32, higher for tokens to keep longer. The softmax is fp32 too: in half precision nearly equal scores tie.
"""

from __future__ import annotations

import torch
from torch import Tensor


def per_logit(bias: Tensor) -> Tensor:
    """A bias of keys (B, N), or one of every pair of tokens (B, heads, N, N), in a shape that adds to logits."""
    return bias[:, None, None] if bias.dim() == 2 else bias


def class_attention_row(q: Tensor, k: Tensor, scale: float, key_bias: Tensor | None) -> Tensor:
    """(B, heads, N) attention of the class token (index 0), key bias included: one row, never the whole matrix."""
    logits = (q[:, :, :1] @ k.transpose(-2, -1)).squeeze(2).float() * scale
    if key_bias is not None:
        logits = logits + per_logit(key_bias)[:, :, 0]
    return logits.softmax(dim=-1)


def class_attention(q: Tensor, k: Tensor, scale: float, key_bias: Tensor | None, prefix: int) -> Tensor:
    """A_c: the class token's row, mean over heads."""
    return class_attention_row(q, k, scale, key_bias).mean(dim=1)[:, prefix:]


def class_attention_value(
    q: Tensor, k: Tensor, v: Tensor, scale: float, key_bias: Tensor | None, prefix: int
) -> Tensor:
    """A_c x |V|: each head's row weighted by the length of its value vectors."""
    row = class_attention_row(q, k, scale, key_bias)
    return (row * v.float().norm(dim=-1)).mean(dim=1)[:, prefix:]


def attention_weights(q: Tensor, k: Tensor, scale: float, key_bias: Tensor | None) -> Tensor:
    """(B, heads, N, N) the whole attention matrix, key bias included."""
    logits = (q @ k.transpose(-2, -1)).float() * scale
    if key_bias is not None:
        logits = logits + per_logit(key_bias)
    return logits.softmax(dim=-1)


def image_attention(weights: Tensor, prefix: int) -> Tensor:
    """A_i: the attention a token receives, mean over all queries and heads."""
    return weights.mean(dim=(1, 2))[:, prefix:]


def random_importance(x: Tensor, prefix: int, block: int, seed: int) -> Tensor:
    """Scores drawn from `seed` and the block alone, by integer hashing so that every run and device agrees."""
    state = torch.arange(prefix, x.shape[1], device=x.device) + 1_000_003 * (block + 1) + 40_503 * seed
    for multiplier in (0x2C1B3C6D, 0x297A2D39):
        state = ((state ^ (state >> 15)) * multiplier) & 0x7FFFFFFF
    return (state.float() / 2**31).expand(x.shape[0], -1)
