"""Removing tokens: rank, prune, merge, and the way back to the full grid (paper 4.1; spec of the block, steps 3-5).

Functions of tensors that know no model. Tokens come out in order of importance, prefix in front (with choice "cost",
those that were spared from merging come last).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from diffrate.devices import full_precision
from diffrate.operator import Operator
from diffrate.tokens import Tokens


def reduce_tokens(tokens: Tokens, importance: Tensor, prune: int, merge: int, operator: Operator) -> Tokens:
    """Take `tokens` down to `merge` tokens, of which those between `prune` and `merge` are merged, not dropped.

    importance  (B, N - prefix) scores of the image tokens.
    prune       tokens kept after pruning, merge tokens kept after merging; both count the prefix.
    """
    n = tokens.count
    if operator.operation == "prune":
        prune = merge
    elif operator.operation == "merge":
        prune = n
    weight = merge_weight(tokens, importance, operator.mean)
    order = rank(importance, tokens.prefix)
    if operator.operation == "merge-prune":
        merged = n - (prune - merge)
        tokens, weight = keep_first(tokens, weight, order, n)
        tokens, weight = merge_last(tokens, weight, merged)
        in_order = torch.arange(merged, device=order.device).expand(order.shape[0], -1)
        return keep_first(tokens, weight, in_order, merge)[0]
    tokens, weight = keep_first(tokens, weight, order, prune)
    if operator.choice == "cost" and tokens.prefix < merge < prune:
        ranked = importance.gather(1, order[:, tokens.prefix : prune] - tokens.prefix)
        return merge_cheapest(tokens, weight, ranked, merge)[0]
    return merge_last(tokens, weight, merge)[0]


def rank(importance: Tensor, prefix: int) -> Tensor:
    """(B, N) token indices, prefix first, then image tokens by falling importance (ties: the earlier token first)."""
    order = importance.argsort(dim=-1, descending=True, stable=True) + prefix
    first = torch.arange(prefix, device=order.device).expand(order.shape[0], -1)
    return torch.cat([first, order], dim=1)


def merge_weight(tokens: Tokens, importance: Tensor, mean: str) -> Tensor | None:
    """(B, N) weight of each token in the mean it is merged into, or None for a plain mean."""
    if mean == "plain":
        return None
    if mean == "size":
        return tokens.sizes()
    floor = torch.finfo(torch.float32).tiny  # importances of zero must still average to something finite
    return F.pad(importance.clamp_min(floor), (tokens.prefix, 0), value=1.0)


def keep_first(
    tokens: Tokens, weight: Tensor | None, order: Tensor, keep: int
) -> tuple[Tokens, Tensor | None]:
    """Prune: keep the first `keep` tokens of `order`, in that order."""
    chosen = order[:, :keep]
    patches = tokens.patches
    if patches is not None:
        patches = move_patches(patches, pruned_destinations(tokens, order, keep))
    kept = replace(
        tokens,
        x=take(tokens.x, chosen),
        size=None if tokens.size is None else tokens.size.gather(1, chosen),
        patches=patches,
        positions=None if tokens.positions is None else tokens.positions.taken(chosen),
    )
    return kept, None if weight is None else weight.gather(1, chosen)


def merge_last(tokens: Tokens, weight: Tensor | None, keep: int) -> tuple[Tokens, Tensor | None]:
    """Merge: each token from position `keep` on joins the most cosine-similar image token before it.

    Without any image token to join, the last tokens are dropped.
    """
    n, prefix = tokens.count, tokens.prefix
    if keep == n:
        return tokens, weight
    if keep == prefix:
        order = torch.arange(n, device=tokens.x.device).expand(tokens.x.shape[0], -1)
        return keep_first(tokens, weight, order, keep)
    similarity, target = most_similar(tokens.x[:, keep:], tokens.x[:, prefix:keep])
    return join(tokens, weight, keep, similarity, target + prefix)


def merge_cheapest(
    tokens: Tokens, weight: Tensor | None, importance: Tensor, keep: int
) -> tuple[Tokens, Tensor | None]:
    """Merge, of the last tokens, those that lose least: importance x (1 - cosine similarity to their target).

    tokens are in order of importance (B, n - prefix). Twice as many of the last ones as must go are candidates, at
    most half of all; each is matched with the tokens before the candidates.
    """
    n, prefix = tokens.count, tokens.prefix
    leave = n - keep
    candidates = min(max(leave, min(2 * leave, (n - prefix) // 2)), n - prefix - 1)
    first = n - candidates
    similarity, target = most_similar(tokens.x[:, first:], tokens.x[:, prefix:first])
    loss = importance[:, first - prefix :] * (1 - similarity)
    order = loss.argsort(dim=-1, descending=True, stable=True)
    ahead = torch.arange(first, device=order.device).expand(order.shape[0], -1)
    tokens, weight = keep_first(tokens, weight, torch.cat([ahead, order + first], dim=1), n)
    joining = order[:, candidates - leave :]
    return join(tokens, weight, keep, similarity.gather(1, joining), target.gather(1, joining) + prefix)


def join(
    tokens: Tokens, weight: Tensor | None, keep: int, similarity: Tensor, target: Tensor
) -> tuple[Tokens, Tensor | None]:
    """Each token from position `keep` on joins its `target` position (B, n - keep).

    A target becomes the (weighted) mean of itself and what joined it; its size grows by size x similarity of each
    joiner, and never falls below 1, so that its logarithm stays finite.
    """
    x, sizes = tokens.x, tokens.sizes()
    size = sizes[:, :keep].scatter_add(1, target, sizes[:, keep:] * similarity).clamp_min(1.0)
    w = torch.ones_like(sizes) if weight is None else weight
    total = w[:, :keep].scatter_add(1, target, w[:, keep:])
    # Shares, not sums: a sum of a hundred half-precision features would lose what the mean needs.
    share = torch.cat([w[:, :keep] / total, w[:, keep:] / total.gather(1, target)], dim=1).to(x.dtype)
    parts = x * share.unsqueeze(-1)
    merged = parts[:, :keep].scatter_add(1, target.unsqueeze(-1).expand(-1, -1, x.shape[-1]), parts[:, keep:])

    patches, positions = tokens.patches, tokens.positions
    stay = torch.arange(keep, device=x.device).expand(x.shape[0], -1)
    if patches is not None:
        patches = move_patches(patches, torch.cat([stay, target], dim=1))
    if positions is not None:
        positions = positions.taken(stay)
    joined = replace(tokens, x=merged, size=size, patches=patches, positions=positions)
    return joined, None if weight is None else total


def most_similar(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """For each of a (B, J, C) its highest cosine similarity to any of b (B, K, C), and which one it is."""
    with full_precision(a.device):  # in half precision all that is very similar would tie
        cosine = F.normalize(a.float(), dim=-1) @ F.normalize(b.float(), dim=-1).transpose(-2, -1)
    best = cosine.max(dim=-1)
    return best.values, best.indices


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` (B, K) of x (B, N, C)."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def pruned_destinations(tokens: Tokens, order: Tensor, keep: int) -> Tensor:
    """(B, N) new position of every token when the first `keep` of `order` stay; ~stand-in for those that go.

    The stand-in of a pruned token is the most similar image token that stays (a prefix token only where no image
    token stays).
    """
    positions = torch.arange(keep, device=order.device).expand(order.shape[0], -1)
    first = tokens.prefix if keep > tokens.prefix else 0
    if keep < order.shape[1]:
        gone, left = take(tokens.x, order[:, keep:]), take(tokens.x, order[:, first:keep])
        positions = torch.cat([positions, ~(most_similar(gone, left)[1] + first)], dim=1)
    return torch.empty_like(order).scatter(1, order, positions)


def move_patches(patches: Tensor, destination: Tensor) -> Tensor:
    """Follow each patch's token to its `destination` (B, N); a patch once pruned stays marked as such."""
    pruned = patches < 0
    moved = destination.gather(1, torch.where(pruned, ~patches, patches))
    return torch.where(pruned & (moved >= 0), ~moved, moved)


def restore(x: Tensor, patches: Tensor) -> Tensor:
    """(B, P, C): the full grid of patches, each with its token's features (a pruned patch with its stand-in's).

    x        (B, N, C) tokens, prefix included, as a compressed model returns them.
    patches  (B, P) the map that came with them.
    """
    return take(x, torch.where(patches < 0, ~patches, patches))
