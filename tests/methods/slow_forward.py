"""A ViT's forward pass written out, one image at a time, with a full attention matrix: what methods are held against.

It shares no code with the package: a method's rule is a function of plain tensors that a test writes from its paper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Seen:
    """One image in one block, after attention: tokens (N, C), attention (heads, N, N), keys, values (heads, N, d)."""

    block: int
    x: Tensor
    weights: Tensor
    keys: Tensor
    values: Tensor
    size: Tensor


Rule = Callable[[Seen], tuple[Tensor, Tensor]]


@torch.no_grad()
def slow_logits(model: Any, images: Tensor, rule: Rule, proportional: bool) -> Tensor:
    """Logits when `rule` makes tokens and sizes out of what it has seen, between attention and MLP."""
    return torch.stack([_one(model, image[None], rule, proportional) for image in images])


def _one(model: Any, image: Tensor, rule: Rule, proportional: bool) -> Tensor:
    x = model.norm_pre(model._pos_embed(model.patch_embed(image)))[0]
    size = torch.ones(len(x))
    for i, block in enumerate(model.blocks):
        attn, y = block.attn, block.norm1(x)
        parts = attn.qkv(y).view(len(x), 3, attn.num_heads, -1)
        q, k, v = (parts[:, j].transpose(0, 1) for j in range(3))  # (heads, N, d)
        logits = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        if proportional:
            logits = logits + size.log()
        weights = logits.softmax(-1)
        x = x + attn.proj((weights @ v).transpose(0, 1).reshape(len(x), -1))
        x, size = rule(Seen(i, x, weights, k, v, size))
        x = x + block.mlp(block.norm2(x))
    x = model.norm(x)
    if model.global_pool == "avg":
        image_size = size[model.num_prefix_tokens :, None]
        x = model.fc_norm((x[model.num_prefix_tokens :] * image_size).sum(0) / image_size.sum())
        return model.head(x)
    return model.head(model.fc_norm(x[0]))
