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
from diffrate.operator import Operator
from diffrate.proxy import Kept, hard_mask
from diffrate.ranking import per_logit, scaled_products
from diffrate.reduction import cosine, take
from diffrate.tokens import Tokens


class MaskedAttention(torch.autograd.Function):
    """softmax over live keys and the query itself (eq. 8-9), with a gradient for every key's mask, also at zero.

    Stores no attention matrix: the backward pass computes it again from q, k and the log-sum of each row.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        key_bias, mask = key_bias.contiguous(), mask.contiguous()
        attend = _kernels().attend if _on_chip(q, key_bias) else _attend
        out, log_sum = attend(q, k, v, key_bias, mask, scale)
        ctx.save_for_backward(q, k, v, key_bias, mask, out, log_sum)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_bias, mask, out, log_sum = ctx.saved_tensors
        backward = _kernels().attend_backward if _on_chip(q, key_bias) else _attend_backward
        grad_q, grad_k, grad_v, grad_mask = backward(
            grads[0].to(v.dtype), q, k, v, key_bias, mask, ctx.scale, out, log_sum
        )
        return grad_q, grad_k, grad_v, None, grad_mask.to(mask.dtype), None


def _on_chip(x: Tensor, bias: Tensor) -> bool:
    """Whether the kernels take these tensors: on a GPU, in half precision, without a bias of every pair of tokens.

    Everything else goes the plain way.
    """
    half = x.dtype in (torch.float16, torch.bfloat16)
    return x.is_cuda and half and bias.dim() == 2 and _kernels() is not None


@functools.cache
def _kernels() -> Any:
    try:
        from diffrate import masked_kernels
    except ImportError:  # no Triton for this platform
        return None
    return masked_kernels


def _attend(
    q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Mixed values over what each query sees, and the log-sum of each row."""
    logits = scaled_products(q, k, scale) + per_logit(key_bias)
    logits = torch.where(_visible(mask), logits, float("-inf"))
    log_sum = logits.logsumexp(dim=-1)
    return (logits - log_sum.unsqueeze(-1)).exp().to(v.dtype) @ v, log_sum


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, mask: Tensor, scale: float,
    out: Tensor, log_sum: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and, (B, N), of the masks."""
    # What each key would weigh if it were live; for live keys, what it weighs. Capped: a dead key's logit can lie
    # far above the row's sum, and its gradient only has to be large.
    logits = scaled_products(q, k, scale) + per_logit(key_bias)
    weight = (logits - log_sum.unsqueeze(-1)).clamp_max(20.0).exp()
    by_weight = _at_least_fp32(grad @ v.transpose(-2, -1))
    sensitivity = weight * (by_weight - _at_least_fp32(grad * out).sum(dim=-1, keepdim=True))
    itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    grad_mask = torch.where(itself, 0.0, sensitivity).sum(dim=(1, 2))
    visible = _visible(mask)
    grad_scores = torch.where(visible, sensitivity, 0.0).to(q.dtype)
    grad_v = torch.where(visible, weight, 0.0).to(grad.dtype).transpose(-2, -1) @ grad
    return (grad_scores @ k) * scale, (grad_scores.transpose(-2, -1) @ q) * scale, grad_v, grad_mask


def _at_least_fp32(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.float()


def _visible(mask: Tensor) -> Tensor:
    """(B, 1, N, N): live keys for every query, and every query for itself."""
    itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    return ((mask > 0.5)[:, None, :] | itself).unsqueeze(1)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _fused(function: Callable[..., Any], x: Tensor) -> Callable[..., Any]:
    """On a GPU a function of many small steps as a few compiled kernels; elsewhere the function as it is."""
    return _compiled(function) if x.is_cuda else function


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
    first = backbone.start(images)
    x, positions = first.x, first.positions
    ones = torch.ones(x.shape[:2], dtype=torch.float32, device=x.device)
    tokens = Masked(x, ones, ones, first.patches)
    for i in range(backbone.layout.depth):
        attention = backbone.open_attention(i, tokens.x, positions)  # no token moves
        q, k, v, scale = attention[:4]
        bias = tokens.size.log() if operator.proportional else torch.zeros_like(tokens.size)
        bias = bias if attention.bias is None else attention.bias + per_logit(bias)
        if i <= compressed[0] and attention.bias is None:  # nothing is masked yet
            mixed = F.scaled_dot_product_attention(q, k, v, scale=scale)
        else:
            mixed = MaskedAttention.apply(q, k, v, bias, tokens.mask, scale)
        tokens = replace(tokens, x=backbone.close_attention(i, tokens.x, mixed))
        if i in compressed:
            with torch.no_grad():
                queries = q if operator.importance == "image-attention" else q[:, :, :1]
                importance, rank = _fused(_ranked, x)(queries, k, scale, bias, tokens.mask, prefix)
            row = compressed.index(i)
            tokens = reduce_masked(tokens, importance, rank, prune, merge, row, prefix, operator)
        tokens = replace(tokens, x=backbone.mlp(i, tokens.x))
    logits = _masked_head(backbone, replace(tokens, x=backbone.norm(tokens.x)), first.grid)
    return logits[0] if isinstance(logits, tuple) else logits


def reduce_masked(
    tokens: Masked,
    importance: Tensor,
    rank: Tensor,
    prune: Kept,
    merge: Kept,
    row: int,
    prefix: int,
    operator: Operator,
) -> Masked:
    """Prune and merge with masks: the twin of reduction.reduce_tokens.

    importance  (B, N), and rank (B, N - prefix) of the image tokens by it, dead ones behind all live ones.
    """
    left, joins, target = _fused(_masks, rank)(
        tokens.mask, rank, prune.keep[row], prune.count[row], merge.keep[row], merge.count[row], prefix,
        operator.operation,
    )  # fmt: skip
    if operator.operation == "prune":
        return replace(tokens, mask=left)
    with torch.no_grad():
        weights = {"plain": None, "size": tokens.size, "attention": importance}
        similarity, index = _most_similar(tokens.x, target)
        size, own, sent = _fused(_shares, rank)(tokens.size, weights[operator.mean], joins, similarity, index)
        patches = tokens.patches
        if patches is not None:
            here = torch.arange(index.shape[1], device=index.device)
            patches = torch.where(joins & similarity.isfinite(), index, here).gather(1, patches)
    return Masked(Join.apply(tokens.x, own, sent, index), size, left, patches)


def _ranked(
    queries: Tensor, k: Tensor, scale: float, bias: Tensor, mask: Tensor, prefix: int
) -> tuple[Tensor, Tensor]:
    """(B, N) attention over live keys, mean over heads and live queries, and (B, N - prefix) the rank by it.

    queries  the class token's alone, or all.
    """
    live = mask > 0.5
    logits = scaled_products(queries, k, scale).float() + per_logit(bias)[:, :, : queries.shape[2]]
    attention = logits.masked_fill(~live[:, None, None], float("-inf")).softmax(dim=-1).mean(dim=1)
    if attention.shape[1] > 1:
        attention = attention * live.float().unsqueeze(-1) / live.float().sum(dim=1)[:, None, None]
    importance = attention.sum(dim=1)
    score = torch.where(live, importance, -1.0)[:, prefix:]  # importances are probabilities: never negative
    ours, theirs = score.unsqueeze(2), score.unsqueeze(1)
    place = torch.arange(score.shape[1], device=score.device)
    ahead = (theirs > ours) | ((theirs == ours) & (place[None] < place[:, None]))
    return importance, ahead.sum(dim=-1)


def _masks(
    mask: Tensor,
    rank: Tensor,
    prune_keep: Tensor,
    prune_count: Tensor,
    merge_keep: Tensor,
    merge_count: Tensor,
    prefix: int,
    operation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, N) mask of the tokens that are left, with its gradient; who joins one of them, and who can be joined."""
    live, first = mask[:, prefix:], mask[:, :prefix]
    kept = hard_mask(merge_keep, merge_count, rank)
    if operation == "prune-merge":
        stays = live * hard_mask(prune_keep, prune_count, rank)
        # What pruning leaves is merged only down to a smaller count; any other has no part here, and no gradient. With
        # a part, two counts that begin as one would have one gradient, stay one for ever, and nothing would merge.
        left = torch.where(merge_count.detach() < prune_count.detach(), stays * kept, stays)
    else:
        stays, left = live, live * kept
    joins, target = (stays > 0.5) & (left < 0.5), left > 0.5
    never = torch.zeros_like(first, dtype=torch.bool)
    return (
        torch.cat([first, left], dim=1),
        torch.cat([never, joins], dim=1),
        torch.cat([never, target], dim=1),
    )


def _most_similar(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(B, N) highest cosine similarity of each token to any of `target`, -inf without one, and its index."""
    if x.is_cuda and _kernels() is not None:
        norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        return _kernels().most_similar(x, 1 / norm.clamp_min(1e-12), target)
    best = cosine(x, x).masked_fill(~target[:, None, :], float("-inf")).max(dim=-1)
    return best.values, best.indices


def _shares(
    size: Tensor, weight: Tensor | None, joins: Tensor, similarity: Tensor, index: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, N) sizes after merging, the share of itself that a token keeps, and the share it sends to its target.

    A target moves to the mean of itself and what joins it. A joiner keeps its own features for itself: it is masked
    from here on, and its gradient asks what if it were not.
    """
    joins = joins & similarity.isfinite()  # without any target nothing joins
    place = torch.arange(size.shape[1], device=size.device)
    into = joins[:, None, :] & (index[:, None, :] == place[None, :, None])  # (B, target, joiner)
    grown = size + torch.where(into, (size * similarity)[:, None, :], 0.0).sum(dim=-1)
    weight = torch.ones_like(size) if weight is None else weight.clamp_min(torch.finfo(torch.float32).tiny)
    total = weight + torch.where(into, weight[:, None, :], 0.0).sum(dim=-1)
    sent = torch.where(joins, weight / total.gather(1, index), 0.0)
    return grown.clamp_min(1.0), weight / total, sent


class Join(torch.autograd.Function):
    """own x x + what others send; tokens that merge with nothing keep every bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Tensor, sent: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(own, sent, index)
        if x.is_cuda and _kernels() is not None:
            joined: Tensor = _kernels().join(x, own, sent, index)
            return joined
        own, sent = own.unsqueeze(-1), sent.unsqueeze(-1)  # fp32, and so is the sum: see reduction.join
        return (own * x).scatter_add(1, index.unsqueeze(-1).expand_as(x), sent * x).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _fused(_from_joined, grads[0])(grads[0], *ctx.saved_tensors), None, None, None


def _from_joined(grad: Tensor, own: Tensor, sent: Tensor, index: Tensor) -> Tensor:
    theirs = grad.gather(1, index.unsqueeze(-1).expand_as(grad))
    return own.unsqueeze(-1).to(grad.dtype) * grad + sent.unsqueeze(-1).to(grad.dtype) * theirs


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
