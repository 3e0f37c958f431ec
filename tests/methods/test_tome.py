"""ToMe and its two successors against their papers: counts, cost, and a forward pass that merges pair by pair."""

from __future__ import annotations

import pytest
import timm
import torch
from slow_forward import Seen, slow_logits
from torch import Tensor
from torch.nn.functional import cosine_similarity

import diffrate
from conftest import random_vit
from diffrate.backbones import backbone_of
from diffrate.methods.policy import PolicyModel
from diffrate.methods.tome import NormPreserving, SizeAware, ToMe, _halves, merge_pairs
from diffrate.tokens import Tokens, start


def tome_rule(r: tuple[int, ...], prefix: int = 1, by_size: bool = False, norm: bool = False):
    """Pairs from Bolya et al., section 3: no tensors of pairs, no scatter."""

    def rule(seen: Seen) -> tuple[Tensor, Tensor]:
        keys = seen.keys.mean(0)
        image = range(prefix, len(seen.x))
        a = [j for j in image if j % 2 == 0]
        b = [j for j in image if j % 2 == 1]
        if by_size:
            ranked = sorted([*a, *b], key=lambda j: seen.size[j].item())  # equal sizes stay in turns
            a, b = sorted(ranked[: len(a)]), sorted(ranked[len(a) :])
        pairs = []
        for j in a:
            best = max(b, key=lambda t: cosine_similarity(keys[j], keys[t], dim=0).item())
            pairs.append((cosine_similarity(keys[j], keys[best], dim=0).item(), j, best))
        pairs.sort(key=lambda pair: -pair[0])
        joined: dict[int, list[int]] = {t: [t] for t in b}
        for _, j, t in pairs[: r[seen.block]]:
            joined[t].append(j)
        gone = {j for _, j, _ in pairs[: r[seen.block]]}
        groups = [[j] for j in range(prefix)] + [[j] for j in a if j not in gone] + [joined[t] for t in b]
        x, size = [], []
        for group in groups:
            total = sum(seen.size[j] for j in group)
            mean = sum(seen.size[j] * seen.x[j] for j in group) / total
            if norm:
                mean = mean / mean.norm() * max(seen.x[j].norm() for j in group)
            x.append(mean)
            size.append(total)
        return torch.stack(x), torch.stack(size)

    return rule


@pytest.mark.parametrize("kind", [ToMe, SizeAware, NormPreserving])
@pytest.mark.parametrize(("pool", "prefix"), [("token", 1), ("avg", 1), ("token", 3)])
def test_logits_of_the_rule_pair_by_pair(kind: type[ToMe], pool: str, prefix: int) -> None:
    model = random_vit(depth=4, global_pool=pool, reg_tokens=prefix - 1)
    images = torch.randn(2, 3, 32, 32)
    r = (12, 9, 7, 5)
    fast = PolicyModel(model, kind(backbone_of(model).layout, r))
    rule = tome_rule(r, prefix, by_size=kind is SizeAware, norm=kind is NormPreserving)
    expected = slow_logits(model, images, rule, proportional=True)
    with torch.no_grad():
        torch.testing.assert_close(fast(images), expected, rtol=1e-4, atol=1e-4)
        others = [
            PolicyModel(model, o(backbone_of(model).layout, r)) for o in (ToMe, SizeAware, NormPreserving)
        ]
        assert sum((other(images) - fast(images)).abs().max() < 1e-3 for other in others) == 1


@pytest.mark.parametrize(
    ("name", "r", "gmacs"),
    [  # the table of DiffRate's paper, and 2.7 from ToMe's
        ("vit_large_patch16_224", 8, 31.0),
        ("vit_large_patch16_224", 5, 42.3),
        ("deit_small_patch16_224", 13, 2.7),
        ("deit_base_patch16_224", 16, 8.8),
        ("deit_base_patch16_224", 11, 11.5),
    ],
)
def test_gmacs_of_the_papers(name: str, r: int, gmacs: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    layout = backbone_of(model).layout
    policy = ToMe.constant(layout, r)
    assert policy.r[:-1] == (r,) * (layout.depth - 1)  # the last block may have fewer left to merge
    assert policy.kept[0] == 197 - r
    assert diffrate.gmacs(PolicyModel(model, policy)) == pytest.approx(gmacs, abs=0.05)


def test_decreasing_r_falls_from_twice_r_to_none() -> None:
    layout = backbone_of(timm.create_model("deit_tiny_patch16_224")).layout
    policy = ToMe.decreasing(layout, 11)
    assert policy.r == (22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0)
    assert policy.kept[-1] == ToMe.constant(layout, 11).kept[-1] == 197 - 132


def test_at_most_half_of_the_image_tokens_merge() -> None:
    layout = backbone_of(random_vit()).layout
    assert ToMe(layout, (60, 60, 60, 60)).kept == (33, 17, 9, 5)


@pytest.mark.parametrize(("gmacs", "r"), [(0.655, 15), (0.81, 11), (1.0, 6)])
@pytest.mark.parametrize("decreasing", [False, True])
def test_meets_a_budget_from_below(gmacs: float, r: int, decreasing: bool) -> None:
    model = timm.create_model("vit_tiny_patch16_224")
    policy = ToMe.at(model, gmacs, decreasing)
    assert 0.99 * gmacs < diffrate.gmacs(PolicyModel(model, policy)) <= gmacs
    if not decreasing:  # the r that was recorded for these budgets, give or take what the last percent needs
        assert all(r - 1 <= each <= r + 1 for each in policy.r)


def test_merging_is_recorded_for_every_patch() -> None:
    model = random_vit()
    fast = PolicyModel(model, ToMe(backbone_of(model).layout, (12, 9, 7, 5)))
    with torch.no_grad():
        _, tokens = fast(torch.randn(2, 3, 32, 32), return_tokens=True)
    assert tokens.patches is not None
    assert tokens.size is not None
    for patches, size in zip(tokens.patches, tokens.size, strict=True):
        assert torch.bincount(patches, minlength=tokens.count).tolist()[1:] == size.long().tolist()[1:]
        assert size[0] == 1


def test_the_larger_half_stays() -> None:
    torch.manual_seed(0)
    size = torch.tensor([[1.0, 9, 8, 1, 1, 7, 1, 6, 1]])
    tokens = Tokens(torch.randn(1, 9, 4), 1, size)
    merged = merge_pairs(tokens, torch.randn(1, 9, 4), 4, by_size=True)
    assert merged.size is not None
    assert merged.count == 5
    assert (merged.size[0, 1:] >= torch.tensor([9.0, 8, 7, 6])).all()
    assert merged.size[0, 1:].sum() == 34


def test_a_mean_of_opposites_keeps_its_norm_finite() -> None:
    x = torch.tensor([[[1.0, 0], [1, 0], [-1, 0]]])
    merged = merge_pairs(start(x, 1, track=False), x, 1, keep_norm=True)
    assert merged.x.isfinite().all()


def test_where_no_image_token_is_left_nothing_is_split() -> None:
    for by_size in (False, True):
        joining, staying = _halves(torch.ones(2, 3), 3, by_size)
        assert joining.shape == staying.shape == (2, 0)
