"""torch's nn.MultiheadAttention, opened up: what torchvision's and OpenCLIP's blocks are built on."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from diffrate.backbones.base import Attention, BlockProducts
from diffrate.backbones.products import linear_shapes


def is_plain(attention: nn.Module) -> bool:
    """Whether it is self-attention by one projection, without extra keys."""
    return (
        type(attention) is nn.MultiheadAttention
        and attention.in_proj_weight is not None
        and attention.bias_k is None
        and not attention.add_zero_attn
        and attention.batch_first
    )


def opened(attention: nn.MultiheadAttention, x: Tensor) -> Attention:
    """q, k and v (B, heads, N, d) of normed tokens."""
    projected = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    q, k, v = projected.unflatten(2, (3, attention.num_heads, attention.head_dim)).permute(2, 0, 3, 1, 4)
    dropout = attention.dropout if attention.training else 0.0
    return Attention(q, k, v, attention.head_dim**-0.5, dropout)


def closed(attention: nn.MultiheadAttention, mixed: Tensor) -> Tensor:
    """The output projection of mixed values (B, heads, N, d)."""
    return F.linear(mixed.transpose(1, 2).flatten(2), attention.out_proj.weight, attention.out_proj.bias)


def macs(attention: nn.MultiheadAttention) -> float:
    """MACs per token of its projections."""
    return 4.0 * attention.embed_dim**2


def products(attention: nn.MultiheadAttention, mlp: nn.Module) -> BlockProducts:
    """Those of a block: the projection of queries, keys and values together, of the output, and an MLP."""
    width = attention.embed_dim
    shapes = ((width, 3 * width), (width, width))
    return BlockProducts(shapes, attention.num_heads, attention.head_dim, linear_shapes(mlp))


def by_size(attention: nn.MultiheadAttention, size: Tensor, queries: int) -> Tensor:
    """(B x heads, queries, N) log(size) as the additive mask that the module takes."""
    bias = size.log().repeat_interleave(attention.num_heads, dim=0)
    return bias.unsqueeze(1).expand(-1, queries, -1)
