"""Importance of image tokens (paper 4.1, eq. 5, and the metrics of its ablation).

Every function takes the queries, keys and values of one block, (B, heads, N, d), and returns (B, N - prefix) scores
in fp32, higher for tokens to keep longer. The softmax is fp32 too: in half precision nearly equal scores tie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diffrate.tokens import Tokens


def per_logit(bias: Tensor) -> Tensor:
    """A bias of keys (B, N), or one of every pair of tokens (B, heads, N, N), in a shape that adds to logits."""
    return bias[:, None, None] if bias.dim() == 2 else bias


def scaled_products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """(B, heads, Q, N) products of queries and keys, at least fp32, and finite wherever q and k are."""
    products = (q * scale) @ k.transpose(
        -2, -1
    )  # scaled first: in fp16 the bare products of wide heads overflow
    if products.dtype == torch.float16:
        most = torch.finfo(torch.float16).max
        products = products.clamp(-most, most)  # one infinity would make a whole row of the softmax NaN
    return products if products.dtype == torch.float64 else products.float()


QUERIES = 15  # image tokens that speak for all of them


def class_attention_row(q: Tensor, k: Tensor, scale: float, key_bias: Tensor | None) -> Tensor:
    """(B, heads, N) attention of the class token (index 0), key bias included: one row, never the whole matrix."""
    logits = scaled_products(q[:, :, :1], k, scale).squeeze(2).float()
    if key_bias is not None:
        logits = logits + per_logit(key_bias)[:, :, 0]
    return logits.softmax(dim=-1)


def class_attention(
    q: Tensor, k: Tensor, scale: float, key_bias: Tensor | None, prefix: int, image_share: float = 0.0
) -> Tensor:
    """A_c: the class token's row, mean over heads; a share may come from the rows of a few image tokens."""
    importance = class_attention_row(q, k, scale, key_bias).mean(dim=1)
    if image_share:
        chosen = image_queries(q.shape[2], prefix, q.device)
        some = None if key_bias is None or key_bias.dim() == 2 else key_bias[:, :, chosen]
        rows = attention_weights(q[:, :, chosen], k, scale, key_bias if some is None else some)
        importance = (1 - image_share) * importance + image_share * rows.mean(dim=(1, 2))
    return importance[:, prefix:]


def image_queries(count: int, prefix: int, device: torch.device | None = None) -> Tensor:
    """(QUERIES,) places of image tokens spread evenly over the sequence, from the first to the last of them."""
    return prefix + torch.arange(QUERIES, device=device) * (count - prefix - 1) // (QUERIES - 1)


def class_attention_value(
    q: Tensor, k: Tensor, v: Tensor, scale: float, key_bias: Tensor | None, prefix: int
) -> Tensor:
    """A_c x |V|: each head's row weighted by the length of its value vectors."""
    row = class_attention_row(q, k, scale, key_bias)
    return (row * v.float().norm(dim=-1)).mean(dim=1)[:, prefix:]


def attention_weights(q: Tensor, k: Tensor, scale: float, key_bias: Tensor | None) -> Tensor:
    """(B, heads, N, N) the whole attention matrix, key bias included."""
    logits = scaled_products(q, k, scale).float()
    if key_bias is not None:
        logits = logits + per_logit(key_bias)
    return logits.softmax(dim=-1)


def image_attention(weights: Tensor, prefix: int) -> Tensor:
    """A_i: the attention a token receives, mean over all queries and heads."""
    return weights.mean(dim=(1, 2))[:, prefix:]


def remembered(importance: Tensor, tokens: Tokens, memory: float) -> Tensor:
    """The importance with a share `memory` of what it was before, where that is known."""
    if not memory or tokens.importance is None:
        return importance
    return (1 - memory) * importance + memory * tokens.importance[:, tokens.prefix :]


def random_importance(x: Tensor, prefix: int, block: int, seed: int) -> Tensor:
    """Scores drawn from `seed` and the block alone, by integer hashing so that every run and device agrees."""
    state = torch.arange(prefix, x.shape[1], device=x.device) + 1_000_003 * (block + 1) + 40_503 * seed
    for multiplier in (0x2C1B3C6D, 0x297A2D39):
        state = ((state ^ (state >> 15)) * multiplier) & 0x7FFFFFFF
    return (state.float() / 2**31).expand(x.shape[0], -1)
