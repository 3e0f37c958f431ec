"""Attention as the walk uses it, with the sizes of tokens as a bias on the keys: torch's own, or the model's choice."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from diffrate.backbones.base import Attention
from diffrate.ranking import per_logit


def mix(attention: Attention, bias: Tensor | None) -> Tensor:
    """(B, heads, N, d) values mixed by attention, with a bias of keys, or of pairs of tokens, added to the logits."""
    q, k, v, scale, dropout = attention[:5]
    mask = None
    if bias is not None:
        mask = bias.to(q.dtype)
        if mask.is_cuda and mask.stride(-2) % 8:
            # Rows of whole 16 bytes: of others, torch makes a padded copy for every head and query, which takes twice
            # as long as the attention itself.
            mask = F.pad(mask, (0, -mask.shape[-1] % 8))[..., : mask.shape[-1]]
        mask = per_logit(mask)
    if attention.by is not None:
        return attention.by(attention, mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
