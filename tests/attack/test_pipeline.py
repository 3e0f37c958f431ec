"""What holds of every model under every schedule, from the images to the restored grid: drawn by hypothesis."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import diffrate
from backbones.test_timm_metaformer import build as small_caformer
from backbones.test_timm_relpos import build as small_beit
from conftest import TINY, random_vit
from diffrate import blocks
from diffrate.backbones import backbone_of
from diffrate.costs.macs import gmacs
from diffrate.methods.policy import PolicyModel
from diffrate.methods.tome import SizeAware, ToMe
from diffrate.operator import CHOICES, MEANS, OPERATIONS, Operator
from diffrate.schedule import Schedule
from diffrate.tokens import Tokens

MODELS = {
    "class token": lambda: random_vit(patch_size=8),
    "registers": lambda: random_vit(patch_size=8, reg_tokens=3),
    "mean of image tokens": lambda: random_vit(patch_size=8, class_token=False, global_pool="avg"),
    "rotary": lambda: timm.create_model("eva02_tiny_patch14_224", **(TINY | {"patch_size": 8})),
    "relative positions": lambda: small_beit("beit_base_patch16_224"),
    "restored grid": small_caformer,
}


@functools.cache
def built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]().eval()


@st.composite
def schedules(draw: st.DrawFn, kind: str) -> Schedule:
    """Any counts that the model takes: rising ones and the prefix alone too."""
    layout = backbone_of(built(kind)).layout
    n, least = layout.tokens, max(layout.prefix + layout.mean_pooled, 1)
    counts = st.lists(st.integers(least, n), min_size=layout.depth - 1, max_size=layout.depth - 1)
    merge = [n, *draw(counts)]
    prune = [n] * layout.depth if layout.restores else [n, *draw(counts)]
    return Schedule(prune, merge, prefix=layout.prefix)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Schedule, dict[str, Any], Tensor]:
    kind = draw(st.sampled_from(sorted(MODELS)))
    layout = backbone_of(built(kind)).layout
    operation, choice = draw(
        st.sampled_from([(o, c) for o in OPERATIONS for c in CHOICES if (o, c) != ("merge-prune", "cost")])
    )
    if layout.restores:
        operation, choice = "merge", "rank"
    importances = ["auto", "image-attention", "random"] + ["class-attention-value"] * layout.class_token
    changes = {
        "operation": operation,
        "choice": choice,
        "mean": draw(st.sampled_from(MEANS)),
        "importance": draw(st.sampled_from(importances)),
        "proportional": draw(st.booleans()),
    }
    seed, scale = draw(st.integers(0, 1000)), draw(st.sampled_from([0.0, 1.0, 50.0]))
    images = scale * torch.randn(
        2, layout.in_chans, *layout.img_size, generator=torch.Generator().manual_seed(seed)
    )
    return kind, draw(schedules(kind)), changes, images


class Spied:
    """The reduction, watched: the prefix comes out as it went in, and what leaves is a subset or a mean."""

    def __init__(self) -> None:
        self.reductions, self.real = 0, blocks.reduce_tokens

    def __call__(
        self, tokens: Tokens, importance: Tensor, prune: int, merge: int, operator: Operator
    ) -> Tokens:
        out = self.real(tokens, importance, prune, merge, operator)
        prefix = tokens.prefix
        assert torch.equal(out.x[:, :prefix], tokens.x[:, :prefix])
        assert torch.equal(out.sizes()[:, :prefix], tokens.sizes()[:, :prefix])
        inside = tokens.x[:, prefix:]
        if out.count > prefix:  # a mean lies within its members
            slack = 1e-5 * inside.abs().amax()
            assert (out.x[:, prefix:].amax(1) <= inside.amax(1) + slack).all()
            assert (out.x[:, prefix:].amin(1) >= inside.amin(1) - slack).all()
        if operator.operation == "prune":
            for ours, theirs in zip(out.x, tokens.x, strict=True):
                assert all((row == theirs).all(-1).any() for row in ours)
        self.reductions += 1
        return out


def groups(patches: Tensor) -> dict[int, set[int]]:
    """The patches of each token that is left, by its number in the sequence."""
    found: dict[int, set[int]] = {}
    for patch, token in enumerate(patches.tolist()):
        if token >= 0:
            found.setdefault(token, set()).add(patch)
    return found


def check_maps(trace: list[Tokens], patches: int, kept: tuple[int, ...], pruned_may_be: bool) -> None:
    """Block by block: tokens are unions of the tokens before, what is gone stays gone, and no patch is in two."""
    for b in range(trace[0].x.shape[0]):
        before = [{patch} for patch in range(patches)]
        for tokens, count in zip(trace, kept, strict=True):
            assert tokens.count == count
            assert tokens.patches is not None
            now = groups(tokens.patches[b])
            assert sorted(now) == list(
                range(tokens.prefix, count)
            )  # every image token has a patch, no prefix has
            for members in now.values():
                inside = [old for old in before if old <= members]
                assert set().union(*inside) == members
            live = set().union(*now.values()) if now else set()
            assert live <= set().union(*before)
            gone = ~tokens.patches[b][tokens.patches[b] < 0]
            assert len(live) + len(gone) == patches
            assert pruned_may_be or not len(gone)
            first = tokens.prefix if count > tokens.prefix else 0
            assert ((gone >= first) & (gone < count)).all()
            before = list(now.values())


@settings(max_examples=60)
@given(cases())
def test_every_walk_keeps_its_promises(case: tuple[str, Schedule, dict[str, Any], Tensor]) -> None:
    kind, schedule, changes, images = case
    model = built(kind)
    fast = diffrate.compress(model, schedule, **changes)
    layout, spy = fast.backbone.layout, Spied()
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(blocks, "reduce_tokens", spy)
        trace = fast.trace(images)
        logits, final = fast(images, return_tokens=True)
    kept = schedule.effective.merge
    starts = (layout.tokens, *kept[:-1])
    removing = sum(after < before for before, after in zip(starts, kept, strict=True))
    assert spy.reductions == 2 * removing
    assert logits.isfinite().all()
    patches = layout.tokens - layout.prefix
    check_maps(
        trace, patches, kept, pruned_may_be=changes["operation"] != "merge" or min(kept) == layout.prefix
    )

    # Sizes: 1 for what stands for itself, at most the patches of a token, and as many in all as there are tokens.
    for tokens in trace:
        for b in range(2):
            sizes = tokens.sizes()[b]
            assert (sizes[: tokens.prefix] == 1).all()
            for token, members in groups(tokens.patches[b]).items():
                assert 1 <= sizes[token] <= len(members) + 1e-3
        if changes["operation"] == "prune":
            assert (tokens.sizes() == 1).all()

    # Restoring: the grid is whole, every patch once, with the features of the token that it is in.
    grid = diffrate.restore(final.x, final.patches)
    assert grid.shape == (2, patches, final.x.shape[-1])
    for b in range(2):
        stands = torch.where(final.patches[b] < 0, ~final.patches[b], final.patches[b])
        assert torch.equal(grid[b], final.x[b][stands])


@settings(max_examples=40)
@given(st.sampled_from(["class token", "registers", "mean of image tokens"]), st.data())
def test_mass_is_conserved_where_it_is_promised(kind: str, data: st.DataObject) -> None:
    """ToMe adds up sizes; and so does merging where all tokens are equal, because their similarity is 1."""
    model = built(kind)
    layout = backbone_of(model).layout
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    r = tuple(data.draw(st.lists(st.integers(0, 6), min_size=layout.depth, max_size=layout.depth)))
    method = data.draw(st.sampled_from([ToMe, SizeAware]))
    with torch.inference_mode():
        for tokens in PolicyModel(model, method(layout, r)).trace(images):
            torch.testing.assert_close(tokens.sizes().sum(1), torch.full((2,), float(layout.tokens)))
            for b in range(2):
                for token, members in groups(tokens.patches[b]).items():
                    assert tokens.sizes()[b, token].item() == pytest.approx(len(members), rel=1e-6)

    tokens = Tokens(torch.ones(1, 20, 4), 1)
    merge = data.draw(st.integers(2, 19))
    reduced = blocks.reduce_tokens(tokens, torch.rand(1, 19), 20, merge, Operator(operation="merge"))
    assert reduced.sizes().sum().item() == pytest.approx(20, rel=1e-5)


@settings(max_examples=80)
@given(st.sampled_from(sorted(MODELS)), st.data())
def test_macs_are_monotone_in_the_schedule(kind: str, data: st.DataObject) -> None:
    """Fewer tokens anywhere never cost more, and cost less wherever what runs has changed."""
    model = built(kind)
    more = data.draw(schedules(kind))
    layout = backbone_of(model).layout
    least = max(layout.prefix + layout.mean_pooled, 1)

    def lowered(counts: tuple[int, ...]) -> tuple[int, ...]:
        return (counts[0], *(data.draw(st.integers(least, count)) for count in counts[1:]))

    prune = more.prune if layout.restores else lowered(more.prune)
    fewer = replace(more, prune=prune, merge=lowered(more.merge))
    costs = gmacs(model, fewer), gmacs(model, more), gmacs(model)
    assert 0 < costs[0] <= costs[1] <= costs[2]
    assert (costs[0] < costs[1]) == (fewer.effective.merge != more.effective.merge)
    assert gmacs(model, more.effective) == costs[1]
