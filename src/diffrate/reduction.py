"""Removing tokens: rank, prune, merge, and the way back to the full grid (paper 4.1; spec of the block, steps 3-5).

Functions of tensors that know no model. Tokens come out prefix in front, then in order of importance or, with choice
"cost", of what merging them would have lost. In training, gradients flow through the features of the tokens that stay
and join; which ones these are, by what weight they join and the sizes that come of it are choices, and carry none.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from diffrate.devices import full_precision
from diffrate.operator import Operator
from diffrate.steps import step
from diffrate.tokens import Tokens

MOST = 1e17  # of a feature whose square is still summed in fp32: beyond, lengths would be infinite and cosines NaN


def reduce_tokens(tokens: Tokens, importance: Tensor, prune: int, merge: int, operator: Operator) -> Tokens:
    """Take `tokens` down to `merge` tokens, of which those between `prune` and `merge` are merged, not dropped.

    importance  (B, N - prefix) scores of the image tokens.
    prune       tokens kept after pruning, merge tokens kept after merging; both count the prefix.
    """
    n, prefix, importance = tokens.count, tokens.prefix, importance.detach()
    if operator.operation == "prune":
        prune = merge
    elif operator.operation == "merge":
        prune = n
    by_cost = operator.choice == "cost" and prefix < merge < prune
    weight = merge_weight(tokens, importance, operator.mean)
    if not by_cost or prune < n:
        with step("ranking"):
            order = rank(importance, prefix)
        with step("merge"):
            if operator.operation == "merge-prune":
                return _merge_then_prune(tokens, weight, order, prune, merge, operator)
            tokens, weight = keep_first(tokens, weight, order, prune, operator.pruned_mass)
            importance = importance.gather(1, order[:, prefix:prune] - prefix)
    if by_cost:
        with step("ranking"):
            loss = merging_loss(tokens.x[:, prefix:].detach(), importance, operator.floor)
            order = rank(loss, prefix)
        with step("merge"):
            tokens, weight = keep_first(tokens, weight, order, prune)
    with step("merge"):
        left, weight = merge_last(tokens, weight, merge, operator.size_aware, operator.keep_norm)
        return replace(left, importance=weight if operator.memory else None)


def _merge_then_prune(
    tokens: Tokens, weight: Tensor | None, order: Tensor, prune: int, merge: int, operator: Operator
) -> Tokens:
    merged = tokens.count - (prune - merge)
    tokens, weight = keep_first(tokens, weight, order, tokens.count)
    tokens, weight = merge_last(tokens, weight, merged, operator.size_aware, operator.keep_norm)
    in_order = torch.arange(merged, device=order.device).expand(order.shape[0], -1)
    left, weight = keep_first(tokens, weight, in_order, merge, operator.pruned_mass)
    return replace(left, importance=weight if operator.memory else None)


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
    tokens: Tokens, weight: Tensor | None, order: Tensor, keep: int, mass: bool = False
) -> tuple[Tokens, Tensor | None]:
    """Prune: keep the first `keep` tokens of `order`, in that order; with `mass` they take over the others' sizes."""
    chosen = order[:, :keep]
    size = None if tokens.size is None else tokens.size.gather(1, chosen)
    if mass and tokens.prefix < keep < tokens.count:
        size = size_with_mass(tokens, order, keep)
    patches = tokens.patches
    if patches is not None:
        patches = move_patches(patches, pruned_destinations(tokens, order, keep))
    kept = replace(
        tokens.with_features(take(tokens.x, chosen)),
        size=size,
        patches=patches,
        positions=None if tokens.positions is None else tokens.positions.taken(chosen),
        log_size=None,
    )
    return kept, None if weight is None else weight.gather(1, chosen)


def size_with_mass(tokens: Tokens, order: Tensor, keep: int) -> Tensor:
    """(B, keep) sizes of the first tokens of `order` when the others leave theirs to the most similar of them."""
    prefix, x = tokens.prefix, tokens.x.detach()
    sizes = tokens.sizes().gather(1, order)
    similarity, target = most_similar(take(x, order[:, keep:]), take(x, order[:, prefix:keep]))
    return added_at(sizes[:, :keep], target + prefix, sizes[:, keep:] * similarity).clamp_min(1.0)


def merge_last(
    tokens: Tokens, weight: Tensor | None, keep: int, size_aware: bool = False, keep_norm: bool = False
) -> tuple[Tokens, Tensor | None]:
    """Merge: each token from position `keep` on joins the most cosine-similar image token before it.

    Without any image token to join, the last tokens are dropped.
    """
    n, prefix = tokens.count, tokens.prefix
    if keep == n:
        return tokens, weight
    if keep == prefix:
        order = torch.arange(n, device=tokens.x.device).expand(tokens.x.shape[0], -1)
        return keep_first(tokens, weight, order, keep)
    with torch.no_grad():
        near = cosine(tokens.x[:, keep:], tokens.x[:, prefix:keep])
        if size_aware and tokens.size is not None:
            larger = tokens.size[:, None, prefix:keep] >= tokens.size[:, keep:, None]
            near = near.masked_fill(~larger & larger.any(dim=2, keepdim=True), float("-inf"))
        similarity, target = near.max(dim=-1)
    return join(tokens, weight, keep, similarity, target + prefix, keep_norm)


def merging_loss(x: Tensor, importance: Tensor, floor: float) -> Tensor:
    """(B, I) what merging away each of I tokens would lose: weight x (1 - similarity to the nearest above it).

    Above it are the tokens of higher importance, so that of two like tokens the less important one goes; the first has
    none, and would lose everything. The weight is the importance and `floor` times its mean: what the class token
    ignores still serves the other tokens, and in some models it ignores most.
    """
    weight = importance + floor * importance.mean(dim=-1, keepdim=True)
    # In order of importance those above a token are those before it: one addition in the product leaves out the others.
    order = importance.argsort(dim=-1, descending=True, stable=True)
    images, count = importance.shape
    others = torch.full((count, count), float("-inf"), device=x.device).triu().expand(images, -1, -1)
    with full_precision(x.device):
        u = F.normalize(take(x.float().clamp(-MOST, MOST), order), dim=-1)
        nearest = torch.baddbmm(others, u, u.transpose(1, 2)).amax(dim=-1)
    nearest = nearest.gather(1, order.argsort(dim=-1))
    return torch.where(nearest.isfinite(), weight * (1 - nearest), float("inf"))


def join(
    tokens: Tokens,
    weight: Tensor | None,
    keep: int,
    similarity: Tensor,
    target: Tensor,
    keep_norm: bool = False,
) -> tuple[Tokens, Tensor | None]:
    """Each token from position `keep` on joins its `target` position (B, n - keep).

    A target becomes the (weighted) mean of itself and what joined it, with `keep_norm` as long as the longest of them,
    which a mean would shrink; its size grows by size x similarity of each joiner, and never falls below 1, so that its
    logarithm stays finite.
    """
    x, sizes = tokens.x, tokens.sizes()
    size = added_at(sizes[:, :keep], target, sizes[:, keep:] * similarity).clamp_min(1.0)
    w = torch.ones_like(sizes) if weight is None else weight
    total = added_at(w[:, :keep], target, w[:, keep:])
    # Shares, not sums, which might overflow, and fp32: half precision has no 1/1000, and adds up no thousand of them.
    share = (w[:, :keep] / total).unsqueeze(-1)
    given = (w[:, keep:] / total.gather(1, target)).unsqueeze(-1)
    merged = added_at(x[:, :keep] * share, target, x[:, keep:] * given)
    if keep_norm:
        norms = x.detach().float().norm(dim=-1)
        longest = highest_at(norms[:, :keep], target, norms[:, keep:])
        shrunk = merged.detach().float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        stretch = longest / shrunk
        merged = merged * torch.where(stretch.isfinite(), stretch, 1.0).unsqueeze(-1)
    merged = merged.to(x.dtype)

    patches, positions = tokens.patches, tokens.positions
    stay = torch.arange(keep, device=x.device).expand(x.shape[0], -1)
    if patches is not None:
        patches = move_patches(patches, torch.cat([stay, target], dim=1))
    if positions is not None:
        positions = positions.taken(stay)
    joined = replace(
        tokens.with_features(merged), size=size, patches=patches, positions=positions, log_size=None
    )
    return joined, None if weight is None else total


def highest_at(base: Tensor, target: Tensor, given: Tensor) -> Tensor:
    """(B, K) the highest of `base`, none of it below zero, and of what is `given` (B, J) to each `target`."""
    if torch.compiler.is_exporting():  # see added_at
        members = (
            target.unsqueeze(1) == torch.arange(base.shape[1], device=target.device)[:, None]
        )  # (B, K, J)
        return torch.maximum(base, (members * given.unsqueeze(1)).amax(dim=2))
    return base.scatter_reduce(1, target, given, "amax")


def added_at(base: Tensor, target: Tensor, given: Tensor) -> Tensor:
    """`base` (B, K) or (B, K, C) with row j of `given` (B, J) or (B, J, C) added at row target[b, j].

    Features, the latter, are added in place.
    """
    rows = base.shape[1]
    if torch.compiler.is_exporting():
        # Other runtimes lack scatter-add or are slow at it: in an exported graph, membership is a matrix product.
        members = target.unsqueeze(1) == torch.arange(rows, device=target.device)[:, None]  # (B, K, J)
        joined = members.to(given.dtype) @ (given if given.dim() == 3 else given.unsqueeze(-1))
        return base + joined.view_as(base)
    if base.dim() == 2:
        return base.scatter_add(1, target, given)
    flat = base.flatten(0, 1).index_add_(0, flat_rows(target, rows), given.flatten(0, 1))
    return flat.unflatten(0, (base.shape[0], rows))


def most_similar(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """For each of a (B, J, C) its highest cosine similarity to any of b (B, K, C), and which one it is."""
    best = cosine(a, b).max(dim=-1)
    return best.values, best.indices


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """(B, J, K) cosine similarities of a (B, J, C) and b (B, K, C)."""
    with full_precision(a.device):  # in half precision all that is very similar would tie
        a, b = (t.float().clamp(-MOST, MOST) for t in (a, b))
        lengths = [t.norm(dim=-1, keepdim=True).clamp_min(1e-12) for t in (a, b)]
        return (a @ b.transpose(-2, -1)) / lengths[0] / lengths[1].transpose(-2, -1)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` (B, K) of x (B, N, C)."""
    # Whole rows of a flat list: on a CPU, gathering feature by feature takes twenty times as long.
    return x.flatten(0, 1).index_select(0, flat_rows(index, x.shape[1])).unflatten(0, tuple(index.shape))


def flat_rows(index: Tensor, n: int) -> Tensor:
    """(B * K,) where rows `index` (B, K) of a (B, n, ...) tensor lie once batch and rows are one dimension."""
    return (index + n * torch.arange(index.shape[0], device=index.device).unsqueeze(1)).flatten()


def pruned_destinations(tokens: Tokens, order: Tensor, keep: int) -> Tensor:
    """(B, N) new position of every token when the first `keep` of `order` stay; ~stand-in for those that go.

    The stand-in of a pruned token is the most similar image token that stays (a prefix token only where no image
    token stays).
    """
    positions = torch.arange(keep, device=order.device).expand(order.shape[0], -1)
    first = tokens.prefix if keep > tokens.prefix else 0
    if keep < order.shape[1]:
        x = tokens.x.detach()
        gone, left = take(x, order[:, keep:]), take(x, order[:, first:keep])
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
