"""Many schedules in one forward pass: rows of a batch that keep different numbers of tokens.

A small model under one schedule is a few hundred short kernels: on a GPU it waits for launches, not for arithmetic.
Here a batch holds every image once for each of dozens of schedules. Embedding and the blocks before the first
compressed one are shared. Each row then ranks and merges by its own counts; a row of fewer tokens than the longest of
its batch carries dead ones behind its live ones, which nobody attends to. The batch shrinks to its longest row in every
block, so schedules should come in batches of similar ones. The last block runs for the class token alone.

For the operator of the fast search: merging only, by cost, attention-weighted means of kept norms, proportional
attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import diffrate
from diffrate.backbones import Backbone, backbone_of
from diffrate.backbones.timm_vit import TimmViT
from diffrate.compressed import run_block
from diffrate.mixing import mix
from diffrate.operator import Operator
from diffrate.outputs import main_output
from diffrate.ranking import class_attention
from diffrate.reduction import cosine
from diffrate.searching.fast import OPERATOR
from diffrate.tokens import Tokens

NEVER = float("-inf")


def fits(model: nn.Module, schedules: list[diffrate.Schedule]) -> bool:
    """Whether this forward knows the model and the operator of these schedules."""
    layout = backbone_of(model).layout
    operators = {schedule.operator for schedule in schedules}
    plainly = {operator.changed(floor=0.0, keep_norm=OPERATOR.keep_norm) for operator in operators}
    known = len(operators) == 1 and plainly == {OPERATOR}
    return known and layout.compresses_last_block and type(backbone_of(model)) is TimmViT


@torch.inference_mode()
def many_logits(model: nn.Module, schedules: list[diffrate.Schedule], images: Tensor) -> Tensor:
    """(S, B, classes) logits of the images under each of the schedules."""
    backbone = backbone_of(model)
    layout, operator = backbone.layout, schedules[0].operator
    counts = torch.tensor(
        [schedule.effective.merge for schedule in schedules], device=images.device
    )  # (S, L)
    longest = counts.amax(dim=0).tolist()
    tokens = backbone.start(images)
    first = 0
    while (
        first < layout.depth - 1 and min(each.effective.merge[first] for each in schedules) == layout.tokens
    ):
        tokens = run_block(backbone, first, tokens, layout.tokens, layout.tokens, operator)
        first += 1
    number = len(schedules) * len(images)
    rows = Rows(
        tokens.x.repeat(len(schedules), 1, 1),
        torch.ones(number, tokens.count, device=images.device),
        torch.full((number,), tokens.count, device=images.device),
    )
    wanted = counts.repeat_interleave(len(images), dim=0)  # (S B, L)
    for i in range(first, layout.depth - 1):
        rows = _block(backbone, i, rows, wanted[:, i], longest[i], operator)
    logits = main_output(_last_block(backbone, rows))
    return logits.float().unflatten(0, (len(schedules), len(images)))


class Rows(NamedTuple):
    """x (R, N, C), size (R, N) and live (R,): the tokens of a row from live on are dead."""

    x: Tensor
    size: Tensor
    live: Tensor

    def alive(self) -> Tensor:
        """(R, N)"""
        return torch.arange(self.x.shape[1], device=self.x.device) < self.live.unsqueeze(1)

    def bias(self) -> Tensor:
        return self.size.log().masked_fill(~self.alive(), NEVER)


def _block(backbone: Backbone, i: int, rows: Rows, keep: Tensor, longest: int, operator: Operator) -> Rows:
    """Block i, after which a row has `keep` (R,) tokens, where it had more; the longest of them `longest`."""
    prefix, bias = backbone.layout.prefix, rows.bias()
    attention = backbone.open_attention(i, rows.x)
    x = backbone.close_attention(i, rows.x, mix(attention, bias))
    importance = class_attention(attention.q, attention.k, attention.scale, bias, prefix)
    left = _merged(rows._replace(x=x), importance, torch.minimum(keep, rows.live), longest, prefix, operator)
    return left._replace(x=backbone.mlp(i, left.x))


def _merged(
    rows: Rows, importance: Tensor, keep: Tensor, longest: int, prefix: int, operator: Operator
) -> Rows:
    """The twin of reduction.reduce_tokens: each row merges down to `keep` tokens; dead tokens take no part."""
    image, size = rows.x[:, prefix:], rows.size[:, prefix:]
    alive = rows.alive()[:, prefix:]
    weight = importance.clamp_min(torch.finfo(torch.float32).tiny)
    total = importance.sum(dim=1) / (rows.live - prefix).clamp_min(1)  # the mean over live tokens
    near = cosine(image, image)  # (R, I, I)
    above = _nearest_above(near, importance, alive)
    cost = (importance + operator.floor * total.unsqueeze(1)) * (1 - above)
    cost = torch.where(above.isfinite(), cost, float("inf"))
    order = cost.masked_fill(~alive, NEVER).argsort(dim=1, descending=True, stable=True)
    place = torch.empty_like(order).scatter(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    stays = place < (keep - prefix).unsqueeze(1)  # (R, I)
    joins = alive & ~stays
    best = near.masked_fill(~stays.unsqueeze(1), NEVER).max(dim=2)
    joins = joins & best.values.isfinite()
    similarity = torch.where(joins, best.values, 0.0)
    target = place.gather(1, best.indices)  # where the target will lie
    given = torch.where(joins, weight, 0.0)
    sums = weight.gather(1, order).scatter_add(1, target, given)
    grown = size.gather(1, order).scatter_add(1, target, size * similarity).clamp_min(1.0)
    # Every token goes to one place: its own, or its target's. As a matrix product that is quicker than adding rows.
    to, end = torch.where(joins, target, place), longest - prefix
    share = torch.where(joins | stays, weight / sums.gather(1, to), 0.0).to(image.dtype)
    moves = image.new_zeros(len(image), end, image.shape[1])
    moves.scatter_(1, torch.where(joins | stays, to, 0).unsqueeze(1), share.unsqueeze(1))
    x = moves @ image
    if operator.keep_norm:
        norms = image.float().norm(dim=-1)
        longest = norms.gather(1, order).scatter_reduce(1, target, torch.where(joins, norms, 0.0), "amax")
        grows = torch.zeros_like(norms).scatter_add(1, target, joins.float()) > 0
        stretch = longest[:, :end] / x.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        stretch = torch.where(grows[:, :end] & stretch.isfinite(), stretch, 1.0)
        x = (x.float() * stretch.unsqueeze(-1)).to(x.dtype)
    return Rows(
        torch.cat([rows.x[:, :prefix], x], dim=1),
        torch.cat([rows.size[:, :prefix], grown[:, :end]], dim=1),
        keep,
    )


def _nearest_above(near: Tensor, importance: Tensor, alive: Tensor) -> Tensor:
    """(R, I) similarity to the nearest live token of higher importance; -inf for the first, which loses all."""
    place = torch.arange(importance.shape[1], device=importance.device)
    ours, theirs = importance.unsqueeze(2), importance.unsqueeze(1)
    above = (theirs > ours) | ((theirs == ours) & (place[None] < place[:, None]))
    return near.masked_fill(~(above & alive.unsqueeze(1)), NEVER).amax(dim=2)


def _last_block(backbone: Backbone, rows: Rows) -> Tensor | tuple[Tensor, Tensor]:
    """The class token through the last block, and the head."""
    i, prefix = backbone.layout.depth - 1, backbone.layout.prefix
    attention = backbone.open_attention(i, rows.x)
    mixed = mix(attention._replace(q=attention.q[:, :, :prefix]), rows.bias())
    x = backbone.mlp(i, backbone.close_attention(i, rows.x[:, :prefix], mixed))
    return backbone.head(Tokens(backbone.norm(x), prefix))


def many_nll(model: nn.Module, schedules: list[diffrate.Schedule], images: Tensor, labels: Tensor) -> Tensor:
    """(S, B) negative log-likelihoods."""
    logits = many_logits(model, schedules, images)
    expected = labels.expand(len(schedules), -1)
    return F.cross_entropy(logits.flatten(0, 1), expected.flatten(), reduction="none").view_as(expected)
