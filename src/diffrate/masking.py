"""The search-time forward: no token is dropped, masks travel with the tokens (paper eq. 8-10).

A masked token is seen by nobody but itself, ranks behind every live token and takes no part in merging. For the same
schedule this forward gives the logits of the dropping forward. Its gradient also reaches the masks of removed tokens:
what the loss would do if they came back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diffrate.backbones import Backbone
from diffrate.devices import full_precision
from diffrate.errors import DiffRateError
from diffrate.operator import Operator
from diffrate.proxy import Kept, hard_mask
from diffrate.ranking import per_logit
from diffrate.reduction import take
from diffrate.tokens import Tokens


class MaskedAttention(torch.autograd.Function):
    """softmax over live keys and the query itself (eq. 8-9), with a gradient for every key's mask, also at zero.

    Stores no attention matrix: the backward pass computes it again from q, k and the log-sum of each row.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        ctx.keys = k.shape[2]
        k, v, key_bias, mask = _padded(k, v, key_bias, mask)
        scores = (q * scale) @ k.transpose(-2, -1)
        weight, log_sum = _pick(_attend, scores)(scores, key_bias, mask)
        out = weight.to(v.dtype) @ v
        ctx.save_for_backward(q, k, v, key_bias, mask, log_sum, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_bias, mask, log_sum, out = ctx.saved_tensors
        grad = grads[0].to(v.dtype)
        scores = (q * ctx.scale) @ k.transpose(-2, -1)
        by_weight = grad @ v.transpose(-2, -1)
        weight, grad_scores, grad_mask = _pick(_sensitivities, scores)(
            scores, by_weight, key_bias, mask, log_sum, (grad * out).sum(dim=-1, keepdim=True)
        )
        grad_v = weight.transpose(-2, -1) @ grad
        grad_q = (grad_scores @ k) * ctx.scale
        grad_k = (grad_scores.transpose(-2, -1) @ q) * ctx.scale
        n = ctx.keys
        return grad_q, grad_k[:, :, :n], grad_v[:, :, :n], None, grad_mask[:, :n].to(mask.dtype), None


def _padded(k: Tensor, v: Tensor, key_bias: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Dead keys up to a multiple of eight: matrix units want rows of 16 bytes, and 197 tokens have none."""
    more = -k.shape[2] % 8
    if more == 0:
        return k, v, key_bias, mask
    return (
        F.pad(k, (0, 0, 0, more)),
        F.pad(v, (0, 0, 0, more)),
        F.pad(key_bias, (0, more)),
        F.pad(mask, (0, more)),
    )


def _attend(scores: Tensor, key_bias: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention weights over what each query sees, and the log-sum of each row."""
    logits = _at_least_fp32(scores) + per_logit(key_bias)
    logits = torch.where(_visible(scores, mask), logits, float("-inf"))
    log_sum = logits.logsumexp(dim=-1, keepdim=True)
    return (logits - log_sum).exp().to(scores.dtype), log_sum


def _sensitivities(
    scores: Tensor, by_weight: Tensor, key_bias: Tensor, mask: Tensor, log_sum: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, and the gradients of scores and masks, from that of the weights (B, heads, N, N)."""
    # What each key would weigh if it were live; for live keys, what it weighs. Capped: a dead key's logit can lie
    # far above the row's sum, and its gradient only has to be large.
    weight = (_at_least_fp32(scores) + per_logit(key_bias) - log_sum).clamp_max(20.0).exp()
    sensitivity = weight * (by_weight - delta)
    grad_mask = torch.where(_itself(scores), 0.0, sensitivity).sum(dim=(1, 2))
    visible = _visible(scores, mask)
    return (
        torch.where(visible, weight, 0.0).to(scores.dtype),
        torch.where(visible, sensitivity, 0.0).to(scores.dtype),
        grad_mask,
    )


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _pick(function: Callable[..., Any], scores: Tensor) -> Callable[..., Any]:
    """On a GPU the matrices pass through memory once, in one compiled kernel; elsewhere the function as it is."""
    return _compiled(function) if scores.is_cuda else function


def _at_least_fp32(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.float()


def _visible(scores: Tensor, mask: Tensor) -> Tensor:
    """(B, 1, N, keys): live keys for every query, and every query for itself."""
    return ((mask > 0.5)[:, None, :] | _itself(scores)).unsqueeze(1)


def _itself(scores: Tensor) -> Tensor:
    """(N, keys): where a query meets itself."""
    queries, keys = scores.shape[-2:]
    device = scores.device
    return torch.arange(queries, device=device)[:, None] == torch.arange(keys, device=device)[None]


@dataclass(frozen=True)
class Masked:
    """Tokens with masks: features (B, N, C), sizes (B, N) and mask (B, N), 1 for live tokens, with its gradient.

    patches  (B, P) the token that each patch went to, for models that restore their grid.
    """

    x: Tensor
    size: Tensor
    mask: Tensor
    patches: Tensor | None = None


def masked_logits(
    backbone: Backbone, images: Tensor, prune: Kept, merge: Kept, compressed: list[int], operator: Operator
) -> Tensor:
    """Logits of the whole model with the counts of two proxies, block `compressed[j]` taking their row j."""
    prefix = backbone.layout.prefix
    if backbone.layout.restores and operator.operation != "merge":
        raise DiffRateError(
            "a model that restores its grid is searched by masks with merging only: use operation merge"
        )
    first = backbone.start(images)
    x, positions = first.x, first.positions
    ones = torch.ones(x.shape[:2], dtype=torch.float32, device=x.device)
    tokens = Masked(x, ones, ones, first.patches)
    for i in range(backbone.layout.depth):
        attention = backbone.open_attention(i, tokens.x, positions)  # no token moves
        q, k, v, scale = attention[:4]
        bias = tokens.size.log() if operator.proportional else torch.zeros_like(tokens.size)
        bias = bias if attention.bias is None else attention.bias + per_logit(bias)
        mixed = MaskedAttention.apply(q, k, v, bias, tokens.mask, scale)
        tokens = replace(tokens, x=backbone.close_attention(i, tokens.x, mixed))
        if i in compressed:
            with torch.no_grad():
                importance = _importance(q, k, scale, bias, tokens.mask, operator)[:, prefix:]
            tokens = reduce_masked(tokens, importance, prune, merge, compressed.index(i), prefix, operator)
        tokens = replace(tokens, x=backbone.mlp(i, tokens.x))
    logits = _masked_head(backbone, replace(tokens, x=backbone.norm(tokens.x)), first.grid)
    return logits[0] if isinstance(logits, tuple) else logits


def reduce_masked(
    tokens: Masked, importance: Tensor, prune: Kept, merge: Kept, row: int, prefix: int, operator: Operator
) -> Masked:
    """Rank, prune and merge with masks: the twin of reduction.reduce_tokens."""
    live = tokens.mask[:, prefix:]
    with torch.no_grad():
        score = importance.masked_fill(live < 0.5, -1.0)  # importances are probabilities: never negative
        order = score.argsort(dim=-1, descending=True, stable=True)
        places = torch.arange(order.shape[1], device=order.device).expand_as(order)
        rank = torch.empty_like(order).scatter_(1, order, places)
    kept = hard_mask(merge, row, rank)
    if operator.operation == "merge":
        stays = live
    elif operator.operation == "prune":
        stays = live * kept
    else:
        stays = live * hard_mask(prune, row, rank)
    left = stays * kept
    x, size, patches = tokens.x, tokens.size, tokens.patches
    if operator.operation != "prune":
        joins = (stays > 0.5) & (left < 0.5)
        x, size, target = _merge(x, size, importance, joins, left > 0.5, prefix, operator)
        patches = None if patches is None else target.gather(1, patches - prefix) + prefix
    mask = torch.cat([tokens.mask[:, :prefix], left], dim=1)
    return Masked(x, size, mask, patches)


def _merge(
    x: Tensor,
    size: Tensor,
    importance: Tensor,
    joins: Tensor,
    target: Tensor,
    prefix: int,
    operator: Operator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Average every joining token into the most similar target; joins and target are (B, N - prefix).

    Returns features, sizes, and the image token that each image token is in now (itself where it did not join).
    """
    image, image_size = x[:, prefix:], size[:, prefix:]
    with torch.no_grad():
        unit = F.normalize(image.float(), dim=-1)
        with full_precision(x.device):  # as in reduction.most_similar
            cosine = unit @ unit.transpose(-2, -1)
        cosine = cosine.masked_fill(~target[:, None, :], float("-inf"))
        similarity, index = cosine.max(dim=-1)  # without any target: -inf, and nothing may join
        joins = joins & similarity.isfinite()
        index = torch.where(joins, index, torch.arange(index.shape[1], device=x.device))
        similarity = torch.where(joins, similarity, 0.0)
        weights = {"plain": torch.ones_like(image_size), "size": image_size, "attention": importance}
        weight = weights[operator.mean].clamp_min(torch.finfo(torch.float32).tiny)
        total = torch.where(joins, 0.0, weight).scatter_add(1, index, torch.where(joins, weight, 0.0))
        share = weight / total.gather(1, index)
        grown = image_size.scatter_add(1, index, image_size * similarity).clamp_min(1.0)
        # As a matrix: row j sends its share to its target. A joiner keeps its own features for itself: it is masked
        # from here on, and its gradient asks what if it were not.
        move = torch.zeros_like(cosine).scatter_(2, index.unsqueeze(-1), share.unsqueeze(-1).to(cosine.dtype))
        own = torch.where(joins, 0.0, share - 1.0).to(cosine.dtype)
        move.diagonal(dim1=1, dim2=2).copy_(own)
    # Only the change goes through the product, so that tokens which merge with nothing keep every bit.
    merged = image + move.transpose(1, 2).to(image.dtype) @ image
    return torch.cat([x[:, :prefix], merged], dim=1), torch.cat([size[:, :prefix], grown], dim=1), index


def _importance(q: Tensor, k: Tensor, scale: float, bias: Tensor, mask: Tensor, operator: Operator) -> Tensor:
    """(B, N) attention over live keys, mean over heads: the class token's, or the mean of all live queries."""
    live = mask > 0.5
    queries = q if operator.importance == "image-attention" else q[:, :, :1]
    logits = (queries @ k.transpose(-2, -1)).float() * scale + per_logit(bias)[:, :, : queries.shape[2]]
    attention = logits.masked_fill(~live[:, None, None], float("-inf")).softmax(dim=-1).mean(dim=1)
    if operator.importance != "image-attention":
        return attention.squeeze(1)
    weight = live.float().unsqueeze(-1)
    return (attention * weight).sum(dim=1) / weight.sum(dim=1)


def _masked_head(backbone: Backbone, tokens: Masked, grid: tuple[int, int] | None) -> Any:
    x = tokens.x
    if tokens.patches is not None:
        # A dead token's place in the grid takes its target's features; its mask says what its own would do there.
        stand_in = take(x, tokens.patches)
        x = stand_in + tokens.mask.unsqueeze(-1).to(x.dtype) * (x - stand_in)
        return backbone.head(Tokens(x, backbone.layout.prefix, grid=grid))
    if not backbone.layout.mean_pooled:
        return backbone.head(Tokens(x, backbone.layout.prefix))
    # A dead token weighs nothing; its mask still carries the gradient of what it would weigh.
    return backbone.head(Tokens(x, backbone.layout.prefix, tokens.size * tokens.mask))
