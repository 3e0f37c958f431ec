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


@given(cases(), st.sampled_from(MEANS))
def test_prune_then_merge_is_the_slow_loop(case, mean):
    tokens, importance, prune, merge = case
    # Which of two equally similar targets is taken is not defined: nudge ties apart without changing the rest.
    x = tokens.x + 0.05 * torch.randn(tokens.x.shape, generator=torch.Generator().manual_seed(0))
    tokens = tokens.with_features(x)
    reduced = reduce_tokens(tokens, importance, prune, merge, Operator(mean=mean))
    for b in range(2):
        sizes = tokens.sizes()[b]
        slow = slow_prune_merge(x[b], sizes, importance[b], tokens.prefix, prune, merge, mean)
        assert reduced.count == merge == len(slow)
        for t, (features, size, members) in enumerate(slow):
            torch.testing.assert_close(reduced.x[b, t].double(), features, rtol=1e-4, atol=1e-5)
            assert reduced.sizes()[b, t].item() == pytest.approx(size, rel=1e-4)
            patches = [m - tokens.prefix for m in members if m >= tokens.prefix]
            assert sorted((reduced.patches[b] == t).nonzero().flatten().tolist()) == sorted(patches)


@given(cases(), operators)
def test_every_operation_keeps_the_count_the_prefix_and_the_map(case, operator):
    tokens, importance, prune, merge = case
    reduced = reduce_tokens(tokens, importance, prune, merge, operator)
    prefix = tokens.prefix
    assert reduced.count == merge
    assert torch.equal(reduced.x[:, :prefix], tokens.x[:, :prefix])
    assert torch.equal(reduced.sizes()[:, :prefix], tokens.sizes()[:, :prefix])
    assert reduced.x.isfinite().all()
    assert reduced.sizes().min() >= 1
    if (key_bias := reduced.key_bias()) is not None:
        assert key_bias.isfinite().all()

    # Every patch has a live image token, or is marked as pruned with a stand-in that is live.
    patches = reduced.patches
    live, gone = patches[patches >= 0], ~patches[patches < 0]
    assert (live >= prefix).all()
    assert (live < merge).all()
    assert (gone < merge).all()
    assert (gone >= (prefix if merge > prefix else 0)).all()
    for b in range(2):  # and every image token that is left stands for at least one patch
        assert set(range(prefix, merge)) <= set(patches[b].tolist())


@given(cases(), operators)
def test_how_many_patches_are_pruned(case, operator):
    tokens, importance, prune, merge = case
    patches = reduce_tokens(tokens, importance, prune, merge, operator).patches
    n, prefix = tokens.count, tokens.prefix
    pruned = (patches < 0).sum(dim=1).tolist()
    if merge == prefix:  # nothing is left to merge into
        assert pruned == [n - prefix] * 2
    elif operator.operation == "prune":
        assert pruned == [n - merge] * 2
    elif operator.operation == "merge":
        assert pruned == [0] * 2
    elif operator.operation == "prune-merge":
        assert pruned == [n - prune] * 2
    else:  # merged tokens may hold several patches, and merging spares the (prune - merge) last ones
        assert all(count >= n - prune for count in pruned)


@given(cases())
def test_pruning_keeps_the_most_important_as_they_were(case):
    tokens, importance, _, merge = case
    reduced = reduce_tokens(tokens, importance, merge, merge, Operator(operation="prune"))
    for b in range(2):
        order = slow_rank(importance[b], tokens.prefix)[:merge]
        assert torch.equal(reduced.x[b], tokens.x[b, order])
        assert torch.equal(reduced.sizes()[b], tokens.sizes()[b, order])


@given(cases())
def test_merge_then_prune_drops_the_least_important_of_what_merging_left(case):
    tokens, importance, prune, merge = case
    n = tokens.count
    reduced = reduce_tokens(tokens, importance, prune, merge, Operator(operation="merge-prune"))
    merged = reduce_tokens(tokens, importance, n, max(n - (prune - merge), 1), Operator(operation="merge"))
    assert torch.equal(reduced.x, merged.x[:, :merge])
    assert torch.equal(reduced.sizes(), merged.sizes()[:, :merge])


@given(cases(), operators)
def test_restore_covers_each_patch_once(case, operator):
    tokens, importance, prune, merge = case
    reduced = reduce_tokens(tokens, importance, prune, merge, operator)
    grid = restore(reduced.x, reduced.patches)
    assert grid.shape == (2, tokens.count - tokens.prefix, 4)
    for b in range(2):
        for p, t in enumerate(reduced.patches[b].tolist()):
            assert torch.equal(grid[b, p], reduced.x[b, t if t >= 0 else -t - 1])


@given(cases())
def test_a_pruned_patch_is_stood_in_for_by_the_most_similar_image_token(case):
    tokens, importance, _, merge = case
    reduced = reduce_tokens(tokens, importance, merge, merge, Operator(operation="prune"))
    first = tokens.prefix if merge > tokens.prefix else 0
    for b in range(2):
        for p, t in enumerate(reduced.patches[b].tolist()):
            if t < 0:
                gone = tokens.x[b, tokens.prefix + p]
                best = max(cosine(gone, other) for other in reduced.x[b, first:])
                assert cosine(gone, reduced.x[b, ~t]) == pytest.approx(best, abs=1e-5)


@given(st.data())
def test_two_moves_of_patches_are_one(data):
    """Moving by a then by b is moving by b(a(.)), and what was pruned on the way stays pruned."""
    n, middle, last, count = (data.draw(st.integers(1, 6)) for _ in range(4))

    def places(low, high, size):
        return torch.tensor([data.draw(st.lists(st.integers(low, high), min_size=size, max_size=size))])

    patches = places(-n, n - 1, count)
    a, b = places(-middle, middle - 1, n), places(-last, last - 1, middle)
    moved = move_patches(move_patches(patches, a), b)
    for p in range(count):
        was = patches[0, p].item()
        via = a[0, was if was >= 0 else ~was].item()
        to = b[0, via if via >= 0 else ~via].item()
        pruned = was < 0 or via < 0 or to < 0
        token = to if to >= 0 else ~to
        assert moved[0, p].item() == (~token if pruned else token)


def test_ties_go_to_the_earlier_token():
    assert rank(torch.tensor([[1.0, 2.0, 2.0, 1.0]]), prefix=1).tolist() == [[0, 2, 3, 1, 4]]


def test_one_image_token():
    tokens = start(torch.randn(2, 2, 4), 1, track=True)
    reduced = reduce_tokens(tokens, torch.ones(2, 1), 1, 1, Operator())
    assert torch.equal(reduced.x, tokens.x[:, :1])
    assert reduced.patches.tolist() == [[~0], [~0]]
    kept = reduce_tokens(tokens, torch.ones(2, 1), 2, 2, Operator())
    assert kept.patches.tolist() == [[1], [1]]


def test_negative_similarity_never_takes_a_size_below_one():
    x = torch.tensor([[[1.0, 0.0], [-1.0, 0.0], [-1.0, 0.1]]])
    tokens = Tokens(x, 0, torch.tensor([[2.0, 5.0, 5.0]]))
    merged, _ = merge_last(tokens, None, 1)
    assert merged.size.tolist() == [[1.0]]
    assert merged.key_bias().tolist() == [[0.0]]


def test_merging_half_precision_features_neither_overflows_nor_drifts():
    x = torch.full((1, 401, 4), 300.0, dtype=torch.float16)  # a sum of 400 would be infinite
    merged, _ = merge_last(start(x, 0, track=False), None, 1)
    assert merged.x.dtype == torch.float16
    torch.testing.assert_close(merged.x, x[:, :1], rtol=0.02, atol=0)
    assert merged.size.item() == pytest.approx(401, rel=1e-3)


FLOOR = 0.5


def slow_cheapest(x, size, importance, prefix, merge):
    """Merging by cost on one image: kept token -> members, by loops over single tokens."""
    rank = slow_rank(importance, prefix)[prefix:]
    floor = FLOOR * float(importance.mean())
    loss = {
        j: (float(importance[j - prefix]) + floor) * (1 - max(cosine(x[j], x[t]) for t in rank[:place]))
        for place, j in enumerate(rank)
        if place
    }
    gone = sorted(loss, key=lambda j: loss[j])[: len(size) - merge]
    members = {j: [j] for j in [*range(prefix), *rank] if j not in gone}
    for j in gone:
        members[max([t for t in members if t >= prefix], key=lambda t: cosine(x[j], x[t]))].append(j)
    return members


@given(cases())
def test_merging_by_cost_is_the_slow_loop(case):
    tokens, importance, _, merge = case
    merge = max(merge, tokens.prefix + 1)
    noise = torch.Generator().manual_seed(0)  # ties between losses or similarities are not defined
    tokens = tokens.with_features(tokens.x + 0.05 * torch.randn(tokens.x.shape, generator=noise))
    importance = importance + 0.01 + 0.1 * torch.rand(importance.shape, generator=noise)
    operator = Operator(operation="merge", choice="cost", mean="attention", floor=FLOOR)
    reduced = reduce_tokens(tokens, importance, tokens.count, merge, operator)
    for b in range(2):
        x, size = tokens.x[b], tokens.sizes()[b]
        members = slow_cheapest(x, size, importance[b], tokens.prefix, merge)
        groups = [{p + tokens.prefix for p in (reduced.patches[b] == t).nonzero().flatten().tolist()}
                  for t in range(tokens.prefix, merge)]  # fmt: skip
        wanted = {frozenset(m) for j, m in members.items() if j >= tokens.prefix}
        assert {frozenset(group) for group in groups} == wanted
        for t, group in zip(range(tokens.prefix, merge), groups, strict=True):
            (kept,) = group & members.keys()
            share = {j: float(importance[b, j - tokens.prefix]) for j in group}
            mean = sum(x[j].double() * share[j] for j in group) / sum(share.values())
            torch.testing.assert_close(reduced.x[b, t].double(), mean, rtol=1e-4, atol=1e-5)
            grown = sum(float(size[j]) * (cosine(x[j], x[kept]) if j != kept else 1.0) for j in group)
            assert reduced.sizes()[b, t].item() == pytest.approx(max(grown, 1.0), rel=1e-4)


def test_what_is_merged_by_cost_joins_the_nearest_that_stays():
    """Three like tokens in a chain, of which two go: the last was compared with the middle one, which goes too."""
    angles = torch.tensor([0.0, 0.2, 0.35, 1.5])
    x = torch.stack([angles.cos(), angles.sin()], dim=-1)[None]
    importance = torch.tensor([[0.4, 0.2, 0.15, 0.25]])
    operator = Operator(operation="merge", choice="cost")
    reduced = reduce_tokens(start(x, 0, track=True), importance, 4, 2, operator)
    assert reduced.patches[0].tolist() in ([0, 0, 0, 1], [1, 1, 1, 0])


def test_most_similar_is_by_angle_not_length():
    similarity, index = most_similar(torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[9.0, 9.0], [0.1, 0.0]]]))
    assert index.item() == 1
    assert math.isclose(similarity.item(), 1.0, rel_tol=1e-6)
    zero, _ = most_similar(torch.zeros(1, 1, 2), torch.ones(1, 1, 2))
    assert zero.item() == 0


def test_cost_choice_does_not_go_with_merging_first():
    with pytest.raises(DiffRateError, match="merge-prune"):
        Operator(operation="merge-prune", choice="cost")


def test_similarity_keeps_its_precision_under_autocast():
    """Tokens that differ by a hundredth: in half precision all of them would be equally similar."""
    base = torch.ones(1, 1, 64)
    nearly = base + 1e-2 * torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        similarity, _ = most_similar(nearly, base)
    assert similarity.dtype == torch.float32
    assert len(set((1 - similarity).flatten().tolist())) == 5


@pytest.mark.parametrize(("prune", "merge"), [(9, 9), (12, 7), (17, 5)])
def test_gradients_go_back_to_the_tokens_that_stayed_or_joined(prune, merge):
    x = torch.randn(2, 17, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    importance = torch.rand(2, 16, generator=torch.Generator().manual_seed(1))
    out = reduce_tokens(start(x, 1, track=True), importance, prune, merge, Operator())
    given = torch.randn(out.x.shape, generator=torch.Generator().manual_seed(2))
    out.x.backward(given)
    for b in range(2):
        where = [0, *out.patches[b].tolist()]  # of each input token; negative where it was pruned
        for token, place in enumerate(where):
            expected = given[b, place] / where.count(place) if place >= 0 else torch.zeros(8)
            torch.testing.assert_close(x.grad[b, token], expected)
    if out.size is not None:
        assert not out.size.requires_grad


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


@given(cases(), st.sampled_from(PAIRS))
def test_a_token_remembers_what_its_members_had_together(case, pair):
    tokens, importance, prune, merge = case
    operator = Operator(operation=pair[0], choice=pair[1], mean="attention", memory=0.3)
    left = reduce_tokens(tokens, importance, prune, merge, operator)
    if left.count == tokens.count:
        return
    for b in range(2):
        together = [0.0] * left.count
        for place, token in enumerate(left.patches[b].tolist()):  # each patch was a token of its own
            if token >= 0:
                together[token] += float(importance[b, place])
        found = left.importance[b, left.prefix :].tolist()
        assert found == pytest.approx(together[left.prefix :], rel=1e-5, abs=1e-6)
    without = reduce_tokens(tokens, importance, prune, merge, operator.changed(memory=0.0))
    assert without.importance is None
    assert torch.equal(without.x, left.x)
