"""Pruning, merging and the patch map against loops over single tokens, for any shape, tie and operation."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffrate.errors import DiffRateError
from diffrate.operator import CHOICES, MEANS, OPERATIONS, Operator
from diffrate.reduction import merge_last, most_similar, move_patches, rank, reduce_tokens, restore
from diffrate.tokens import Tokens, start


@st.composite
def cases(draw):
    """(tokens with patch map, importance, prune, merge): random, or with tied importances and equal tokens."""
    prefix, images = draw(st.integers(0, 3)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    n = prefix + images
    x = torch.randn(2, n, 4, generator=generator)
    importance = torch.rand(2, images, generator=generator)
    match draw(st.sampled_from(["random", "ties", "equal tokens", "opposite tokens"])):
        case "ties":
            importance = (importance * 2).round()
        case "equal tokens":
            x = x[:, :1].expand(-1, n, -1).clone()
        case "opposite tokens":
            x = x[:, :1] * torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0)[None, :, None]
    least = max(prefix, 1)
    prune = draw(st.integers(least, n))
    merge = draw(st.integers(least, prune))
    tokens = start(x, prefix, track=True)
    if draw(st.booleans()):
        tokens = Tokens(x, prefix, 1 + 3 * torch.rand(2, n, generator=generator), tokens.patches)
    return tokens, importance, prune, merge


PAIRS = [pair for pair in itertools.product(OPERATIONS, CHOICES) if pair != ("merge-prune", "cost")]
operators = st.builds(
    lambda pair, **more: Operator(operation=pair[0], choice=pair[1], **more),
    st.sampled_from(PAIRS),
    mean=st.sampled_from(MEANS),
)


def slow_rank(importance, prefix):
    scores = importance.tolist()
    return [*range(prefix), *sorted(range(prefix, prefix + len(scores)), key=lambda j: -scores[j - prefix])]


def cosine(a, b):
    return float(torch.cosine_similarity(a.double(), b.double(), dim=0, eps=1e-12))


def slow_prune_merge(x, size, importance, prefix, prune, merge, mean):
    """The paper's step on one image: kept token -> (features, size, members), in ranked order."""
    order = slow_rank(importance, prefix)
    kept, joiners = order[:merge], order[merge:prune]
    members, grown = {j: [j] for j in kept}, {j: float(size[j]) for j in kept}
    if merge > prefix:
        for j in joiners:
            best = max(kept[prefix:], key=lambda t: cosine(x[j], x[t]))
            members[best].append(j)
            grown[best] += float(size[j]) * cosine(x[j], x[best])
    weigh = {
        "plain": lambda j: 1.0,
        "size": lambda j: float(size[j]),
        "attention": lambda j: max(float(importance[j - prefix]), 1e-38) if j >= prefix else 1.0,
    }[mean]
    out = []
    for j in kept:
        total = sum(weigh(m) for m in members[j])
        out.append(
            (sum(x[m].double() * (weigh(m) / total) for m in members[j]), max(grown[j], 1.0), members[j])
        )
    return out


@pytest.mark.parametrize("sized", [False, True])
def test_the_mass_of_pruned_tokens_goes_to_the_most_similar_one(sized: bool) -> None:
    torch.manual_seed(0)
    x, importance = torch.randn(3, 12, 4), torch.rand(3, 10)
    tokens = Tokens(x, 2, 1 + 3 * torch.rand(3, 12) if sized else None)
    pruned = reduce_tokens(tokens, importance, 6, 6, Operator(pruned_mass=True))
    torch.testing.assert_close(pruned.x, reduce_tokens(tokens, importance, 6, 6, Operator()).x)
    for b in range(3):
        order = slow_rank(importance[b], 2)
        sizes = {j: tokens.sizes()[b, j].item() for j in order}
        for j in order[6:]:
            near = {k: cosine(x[b, j], x[b, k]) for k in order[2:6]}
            nearest = max(near, key=lambda k: near[k])
            sizes[nearest] += tokens.sizes()[b, j].item() * near[nearest]
        expected = [max(1.0, sizes[j]) for j in order[:6]]
        assert pruned.sizes()[b].tolist() == pytest.approx(expected, rel=1e-4)
    both = reduce_tokens(tokens, importance, 6, 4, Operator(pruned_mass=True))  # then merged: masses go along
    plain = reduce_tokens(tokens, importance, 6, 4, Operator())
    torch.testing.assert_close(both.x, plain.x)
    assert bool((both.sizes().sum(dim=1) > plain.sizes().sum(dim=1)).all())


def test_a_token_joins_one_that_is_no_smaller() -> None:
    # one prefix token; two targets, of which the nearer is smaller than the joiner
    x = torch.tensor([[[9.0, 9.0], [1.0, 0.0], [0.6, 0.8], [1.0, 0.1]]])
    tokens = Tokens(x, 1, torch.tensor([[1.0, 2.0, 5.0, 3.0]]))
    plain, _ = merge_last(tokens, None, 3)
    aware, _ = merge_last(tokens, None, 3, size_aware=True)
    near, far = cosine(x[0, 3], x[0, 1]), cosine(x[0, 3], x[0, 2])
    assert plain.sizes()[0].tolist() == pytest.approx([1, 2 + 3 * near, 5])
    assert aware.sizes()[0].tolist() == pytest.approx([1, 2, 5 + 3 * far])
    large = Tokens(x, 1, torch.tensor([[1.0, 2.0, 5.0, 7.0]]))  # none is as large: the nearest
    assert merge_last(large, None, 3, size_aware=True)[0].sizes()[0].tolist() == pytest.approx(
        [1, 2 + 7 * near, 5]
    )


@pytest.mark.parametrize("mean", MEANS)
def test_a_merged_token_is_as_long_as_its_longest_member(mean: str) -> None:
    torch.manual_seed(0)
    tokens, importance = start(torch.randn(2, 9, 4), 1, track=True), torch.rand(2, 8)
    plain, long = (
        reduce_tokens(tokens, importance, 9, 4, Operator(operation="merge", mean=mean, keep_norm=on))
        for on in (False, True)
    )
    for b in range(2):
        for t in range(1, 4):
            members = [p for p in range(8) if long.patches[b, p] == t]
            longest = max(tokens.x[b, 1 + p].norm().item() for p in members)
            assert long.x[b, t].norm().item() == pytest.approx(longest, rel=1e-5)
            assert cosine(long.x[b, t], plain.x[b, t]) == pytest.approx(1, abs=1e-5)
