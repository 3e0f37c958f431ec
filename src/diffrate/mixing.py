"""Attention as the walk uses it: torch's own, with the sizes of tokens as a bias on the keys."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from diffrate.backbones.base import Attention


def mix(attention: Attention, key_bias: Tensor | None) -> Tensor:
    """(B, heads, N, d) values mixed by attention, with the key bias added to the logits of every query."""
    q, k, v, scale, dropout = attention
    mask = None
    if key_bias is not None:
        mask = key_bias.to(q.dtype)
        if mask.is_cuda:
            # Rows of whole 16 bytes: of others, torch makes a padded copy for every head and query, which takes twice
            # as long as the attention itself.
            mask = F.pad(mask, (0, -mask.shape[1] % 8))[:, : mask.shape[1]]
        mask = mask[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
