"""How many of the removed tokens are merged: learned beside the counts, where the operator does both."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import diffrate
from conftest import random_vit
from diffrate import Operator, Schedule
from diffrate.backbones import backbone_of
from diffrate.costs.macs import MacCost
from diffrate.searching import fast
from diffrate.searching.budget import Space, project, rounded
from diffrate.searching.split import CHANGE, Split, even_split, pruned, split_of
from diffrate.searching.starts import Start, starts
from diffrate.searching.subject import Subject

KEPT = (65, 50, 50, 20, 10, 1)


@pytest.fixture
def model():
    return random_vit(depth=6)


@pytest.fixture
def space(model):
    backbone = backbone_of(model)
    return Space.of(backbone, MacCost.of_backbone(backbone))


def shares(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_shares_say_how_many_are_merged_and_schedules_say_the_shares(space):
    prune = pruned(KEPT, shares(1.0, 0.3, 0.5, 0.0), space)
    assert prune == (65, 65, 50, 35, 10, 1)  # the last block of a class-token model has no choice
    said = [15.5 / 16, 0.5, 0.5, 0.5 / 11]  # even where nothing goes
    assert split_of(Schedule(prune, KEPT), space).tolist() == pytest.approx(said)
    rising = Schedule((65, 65, 60, 35, 10, 1), (65, 50, 55, 20, 10, 1))  # runs as the one above
    assert split_of(rising, space).tolist() == pytest.approx(said)
    for operation, share in (("merge", 1.0), ("prune", 0.0)):
        one_way = Schedule(KEPT, KEPT, operator=Operator(operation=operation))
        assert split_of(one_way, space).tolist() == [share] * 4


@given(st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16)), min_size=4, max_size=4))
def test_a_schedule_comes_back_from_the_shares_that_it_says(steps):
    backbone = backbone_of(random_vit(depth=6))
    space = Space.of(backbone, MacCost.of_backbone(backbone))
    kept, prune = [65], [65]
    for removed, merged in steps:
        prune.append(kept[-1] - removed + min(merged, removed))
        kept.append(kept[-1] - removed)
    schedule = Schedule((*prune, 1), (*kept, 1))
    found = split_of(schedule, space)
    assert pruned(schedule.merge, found, space) == schedule.prune
    for share, (removed, merged) in zip(found.tolist(), steps, strict=True):
        # The middle of what these whole tokens can have meant, or nearer to a half.
        least, most = ((min(merged, removed) + d) / max(removed, 1) for d in (-0.5, 0.5))
        assert max(least, 0) <= share <= min(most, 1)
        assert share == 0.5 if not removed else True


def test_tied_blocks_have_one_share(space):
    tied = replace(space, ties=((0,), (1, 2), (3, 4), (5,)))
    kept = (65, 50, 50, 20, 20, 1)
    assert len(even_split(tied)) == 2
    prune = pruned(kept, shares(0.4, 0.9), tied)
    assert prune == (65, 56, 50, 47, 20, 1)
    assert split_of(Schedule(prune, kept), tied).tolist() == pytest.approx([6.5 / 16, 27.5 / 31])


def test_what_a_step_measures_stays_within_none_and_all(space):
    split = Split.begin(even_split(space), 10)
    split.shares = shares(0.1, 0.5, 0.9, 1.0)
    around = split.around(torch.tensor([[1.0, 1, 1, 1], [-1, -1, -1, -1]]).double())
    assert around[0].tolist() == pytest.approx([0.1 + CHANGE, 0.5 + CHANGE, 1.0, 1.0])
    assert around[1].tolist() == pytest.approx([0.0, 0.5 - CHANGE, 0.9 - CHANGE, 1.0 - CHANGE])
    assert split.changes(around)[0].tolist() == pytest.approx([1.0, 1.0, 0.4, 0.0])
    slopes = shares(-1.0, 1.0, -1.0, 1.0)
    split.update(slopes)
    assert split.shares.tolist() == pytest.approx([0.2, 0.4, 1.0, 0.9])  # a tenth, of ten steps the first
    for _ in range(9):
        split.update(slopes)
    assert split.shares.tolist() == pytest.approx([0.1 + 0.55, 0.5 - 0.5, 1.0, 1.0 - 0.55], abs=1e-6)
    for _ in range(10):
        split.update(slopes)
    assert split.shares[1] == 0.0
    assert split.shares[2] == 1.0


def test_an_operator_of_one_way_has_no_shares(space):
    for operation in ("prune", "merge"):
        schedule = fast.schedule_of(list(KEPT), space, Operator(operation=operation))
        assert schedule.prune == schedule.merge == KEPT
    for operation in ("prune-merge", "merge-prune"):
        schedule = fast.schedule_of(list(KEPT), space, Operator(operation=operation))
        assert schedule.merge == KEPT
        assert schedule.prune == pruned(KEPT, even_split(space), space) == (65, 58, 50, 35, 15, 1)


class Known(Subject):
    """Its loss is least where 3 in 4 of the tokens that go are merged in the first blocks, and none in the others."""

    wanted = (0.75, 0.75, 0.0, 0.0)

    def under_many(self, schedules, images):
        losses = []
        for each in schedules:
            removed = torch.tensor([each.merge[b - 1] - each.merge[b] for b in range(1, 5)]).double()
            merged = torch.tensor([each.prune[b] - each.merge[b] for b in range(1, 5)]).double()
            far = merged - torch.tensor(self.wanted) * removed
            losses.append(
                far.square().sum() / 100 + torch.tensor(each.merge[1:5]).double().reciprocal().sum()
            )
        return torch.stack(losses).float()[:, None, None].expand(-1, len(images), 7)

    def divergence(self, teacher, answers, temperature=None):
        return answers[..., 0]


def test_a_descent_learns_the_split_that_a_known_loss_wants(model, space):
    budget = 0.5 * diffrate.gmacs(model)
    start = Start(starts(space, budget)[0], even_split(space))
    course = fast.FastRecipe(Known(model), space, Operator(), budget, 60, start, 0, lambda sums: sums)
    for _ in range(60):
        course.step(torch.randn(2, 3, 32, 32), torch.zeros(2))
    found = course.answer()
    assert diffrate.gmacs(model, found) <= budget
    for block, wanted in enumerate(Known.wanted, start=1):
        removed = found.merge[block - 1] - found.merge[block]
        assert found.prune[block] - found.merge[block] == pytest.approx(wanted * removed, abs=2.0)


def test_a_share_at_its_end_is_said_to_have_moved_one_way_alone(model, space, monkeypatch):
    budget, seen = 0.5 * diffrate.gmacs(model), []
    start = Start(starts(space, budget)[0], shares(0.0, 1.0, 0.5, 0.9))
    course = fast.FastRecipe(Known(model), space, Operator(), budget, 60, start, 0, lambda sums: sums)
    real = fast.slopes

    def watched(counts, space, measured, losses, changes):
        seen.append(changes)
        return real(counts, space, measured, losses, changes)

    monkeypatch.setattr(fast, "slopes", watched)
    course.step(torch.randn(2, 3, 32, 32), torch.zeros(2))
    moved = [sorted(set(column.tolist())) for column in seen[0].T]
    assert moved[:3] == [[0.0, 1.0], [-1.0, 0.0], [-1.0, 1.0]]
    assert moved[3] == pytest.approx([-1.0, 0.4])


def test_the_answer_has_the_mean_of_the_shares_and_the_present_point_its_own(model, space):
    budget = 0.5 * diffrate.gmacs(model)
    start = Start(starts(space, budget)[0], even_split(space))
    course = fast.FastRecipe(Known(model), space, Operator(), budget, 6, start, 0, lambda sums: sums)
    for _ in range(3):
        course.step(torch.randn(2, 3, 32, 32), torch.zeros(2))
    mean = torch.tensor(course.split.path, dtype=torch.float64).mean(dim=0)
    answer, present = course.answer(), course.present()
    assert (
        answer.prune == pruned(answer.merge, mean, space) != pruned(answer.merge, course.split.shares, space)
    )
    assert present.prune == pruned(present.merge, course.split.shares, space)
    assert present.merge == tuple(rounded(course.descent.counts, budget, space))


def test_between_several_beginnings_lie_the_means_of_both(space, model):
    budget = 0.5 * diffrate.gmacs(model)
    first, second = starts(space, budget)[:2]
    some = [Start(first, shares(0.0, 0.2, 0.5, 1.0)), Start(second, shares(0.5, 0.4, 0.5, 0.0))]
    found = Start.between(some, budget, space)
    assert found.shares.tolist() == pytest.approx([0.25, 0.3, 0.5, 0.5])
    torch.testing.assert_close(found.counts, project((first + second) / 2, budget, space, space.freely()))


def test_a_split_goes_on_where_it_stopped(space):
    draw = random.Random(0)
    slopes = [shares(*(draw.gauss(0, 1) for _ in range(4))) for _ in range(8)]
    whole, part, rest = (Split.begin(even_split(space), 8) for _ in range(3))
    for each in slopes:
        whole.update(each)
    # Of eight steps the last six, as of a descent's counts; and steps get shorter.
    torch.testing.assert_close(whole.answer(), torch.tensor(whole.path[2:], dtype=torch.float64).mean(dim=0))
    moved = torch.tensor(whole.path, dtype=torch.float64).diff(dim=0).abs().mean(dim=1)
    assert moved[-1] < 0.5 * moved[0]
    for each in slopes[:3]:
        part.update(each)
    rest.restore(part.state())
    for each in slopes[3:]:
        rest.update(each)
    assert torch.equal(rest.answer(), whole.answer())
    assert rest.state() == whole.state()


class Held:
    """Held-out images that find the first schedule the best, surely so or not."""

    def __init__(self, candidates, sure=True):
        self.subject, self.seen, self.sure = SimpleNamespace(starts=lambda *_: candidates), [], sure

    def each(self, schedule):
        self.seen.append(schedule)
        return torch.tensor([float(len(self.seen))])

    def mean(self, each):
        return float(each.mean())

    def clearly_above(self, each, other, errors=1.0):
        return self.sure and self.mean(each) > self.mean(other)


@pytest.mark.parametrize("sure", [True, False])
def test_the_next_budget_begins_at_the_split_of_the_last_whatever_its_counts(space, model, sure):
    budget = 0.5 * diffrate.gmacs(model)
    last = Schedule(pruned(KEPT, shares(0.9, 0.5, 0.8, 1.0), space), KEPT)
    simple = starts(space, budget)
    held = Held(simple, sure)
    found = fast.best_start(space, budget, Operator(), held, start=None, last=last)
    assert torch.equal(found.shares, split_of(last, space))
    before = project(space.searched(last), budget, space, space.freely())
    wanted = before if sure else torch.stack([before, *simple]).mean(dim=0)
    torch.testing.assert_close(found.counts, project(wanted, budget, space, space.freely()))
    assert len(held.seen) == 1 + len(simple)
    assert all(
        each.prune == pruned(each.merge, found.shares, space) for each in held.seen
    )  # and judged by it
    its_own = fast.best_start(space, budget, Operator(), Held([]), start=last, last=None)
    assert torch.equal(its_own.shares, found.shares)
    assert (
        fast.best_start(space, budget, Operator(), Held(simple[:1]), None, None).shares.tolist() == [0.5] * 4
    )
