"""Where a descent begins: random shapes, and the best of many of them."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

import diffrate
from conftest import random_vit
from diffrate.backbones import backbone_of
from diffrate.costs.macs import MacCost
from diffrate.searching import best_of_many, fast
from diffrate.searching.best_of_many import LEFT, BestOfMany
from diffrate.searching.budget import Space, project, rounded
from diffrate.searching.held_out import HeldOut
from diffrate.searching.images import SearchImages
from diffrate.searching.report import Progress
from diffrate.searching.split import even_split
from diffrate.searching.starts import Start, random_starts, starts
from diffrate.searching.subject import Subject


@pytest.fixture
def space():
    backbone = backbone_of(random_vit(depth=6))
    return Space.of(backbone, MacCost.of_backbone(backbone))


class Known(Subject):
    """A model of which every schedule's divergence is known: an image adds noise, the same to near and far ones."""

    def __init__(self, best, model):
        super().__init__(model)
        self.best, self.calls = best, []

    def under(self, schedule):
        def answers(images):
            if schedule is None:
                return torch.zeros(len(images), 1)
            return torch.tensor([[self.of(schedule.merge, x)] for x in images[:, 0, 0, 0].tolist()])

        return answers

    def under_many(self, schedules, images):
        self.calls.append(([each.merge for each in schedules], images[:, 0, 0, 0].tolist()))
        return torch.stack([self.under(each)(images) for each in schedules])

    def of(self, merge, pixel):
        kept = torch.tensor(merge, dtype=torch.float64)
        noise = math.sin(1e3 * pixel * float(kept.sum() + kept[1]))
        return float((kept - self.best).square().mean()) + 30 * noise

    def divergence(self, teacher, answers, temperature=None):
        return answers[..., 0]


def many(subject, data, batch_size=40, reduce=lambda sums: sums, **accelerator):
    images = SearchImages(data, data, 0.2, seed=0, views=4)
    processes = SimpleNamespace(
        **{"process_index": 0, "num_processes": 1, "device": torch.device("cpu")} | accelerator,
        autocast=Accelerator(cpu=True).autocast,
    )
    held = HeldOut(subject, images, Accelerator(cpu=True), batch_size=8, workers=0)
    bar = Progress(False)
    bar.start("", 1, 0)
    return BestOfMany(images, held, batch_size, processes, 0, reduce, bar)


def test_random_shapes_lie_on_the_budget_and_differ(space):
    budget = 0.5 * space.cost.of_schedule(None)
    drawn = random_starts(space, budget, 40, seed=3)
    assert len(drawn) == 40
    for counts in drawn:
        assert float(space.gmacs(counts)) == pytest.approx(budget, rel=1e-3)
        assert (counts.diff() <= 1e-9).all()
        assert (counts >= space.least).all()
        assert (counts <= space.most).all()
    assert torch.stack(drawn).std(dim=0)[1:-1].min() > 3
    assert all(map(torch.equal, drawn, random_starts(space, budget, 40, seed=3)))
    assert not torch.equal(drawn[0], random_starts(space, budget, 1, seed=4)[0])


@pytest.fixture
def budget(space):
    return 0.5 * space.cost.of_schedule(None)


def test_the_mean_of_the_best_is_where_it_begins(space, budget, data):
    """As an independent halving finds it, from images whose noise is as large as what lies between most shapes."""
    best = torch.tensor([65.0, 60, 35, 15, 5, 1], dtype=torch.float64)
    simple = Start(starts(space, budget)[1], even_split(space))
    subject = Known(best, random_vit(depth=6))
    reduced = []

    def reduce(sums):
        reduced.append(len(sums))
        return 2 * sums  # of another process that has seen the same

    chooser = many(subject, data, reduce=reduce)
    found = chooser.begin(space, budget, fast.OPERATOR, simple, 400, seed=0)

    drawn = [simple.counts, *random_starts(space, budget, chooser.count(space, 400), seed=0)]
    left = {tuple(rounded(counts, budget, space)): counts for counts in drawn}
    totals, seen, lengths, calls = dict.fromkeys(left, 0.0), [], [], iter(subject.calls)
    while len(left) > LEFT:
        pixels = []
        while len(pixels) < max(len(seen), 16):  # a batch, of at most 32 images, which all shapes see in turn
            ran = 0
            while ran < len(left):
                merges, some = next(calls)
                assert merges == sorted(left)[ran : ran + 32]  # side by side, those that share blocks
                for each in merges:
                    totals[each] += sum(subject.of(each, pixel) for pixel in some)
                ran += len(merges)
            assert len(some) <= 32
            pixels += some
        lengths.append(len(pixels))
        seen += pixels
        left = {each: left[each] for each in sorted(left, key=totals.get)[: max(LEFT, len(left) // 2)]}
    assert lengths == [16, 16, 32, 64, 128, 256]
    assert len(set(seen[:32])) == 32  # no image of the 32 came twice before all had come
    mean = project(torch.stack(list(left.values())).mean(0), budget, space, space.freely())
    torch.testing.assert_close(found.counts, mean)
    assert len(reduced) == 6

    def distance(counts):
        return float((torch.tensor(rounded(counts, budget, space)) - best).square().mean())

    assert distance(found.counts) < 0.5 * distance(simple.counts)
    assert distance(found.counts) < sorted(map(distance, drawn))[len(drawn) // 20]


class KnownSplit(Known):
    """Its divergence says how far a schedule is from merging three of four tokens that go, counts hardly matter."""

    def under(self, schedule):
        def answers(images):
            if schedule is None:
                return torch.zeros(len(images), 1)
            gone = sum(a - b for a, b in zip(schedule.merge, schedule.merge[1:-1], strict=False))
            merged = sum(a - b for a, b in zip(schedule.prune, schedule.merge, strict=True))
            return torch.full((len(images), 1), abs(merged / gone - 0.75) + 1e-4 * schedule.merge[2])

        return answers


def test_it_begins_with_the_split_of_the_best(space, budget, data):
    simple = Start(starts(space, budget)[1], even_split(space))
    chooser = many(KnownSplit(None, random_vit(depth=6)), data)
    found = chooser.begin(space, budget, diffrate.Operator(), simple, 400, seed=0)
    assert found.shares.tolist() == [0.75] * 4
    assert float(space.gmacs(found.counts)) == pytest.approx(budget, rel=1e-3)
    one_way = chooser.begin(space, budget, diffrate.Operator(operation="prune"), simple, 400, seed=0)
    assert one_way.counts[2] < found.counts[2]  # there counts alone tell shapes apart


def test_a_beginning_that_held_out_images_find_worse_is_not_taken(space, budget, data, monkeypatch):
    subject = Known(torch.tensor([65.0, 60, 35, 15, 5, 1]), random_vit(depth=6))
    simple = Start(starts(space, budget)[1], even_split(space))
    monkeypatch.setattr(HeldOut, "clearly_above", lambda self, each, other: True)
    assert many(subject, data).begin(space, budget, fast.OPERATOR, simple, 400, seed=0) is simple


def test_where_next_to_nothing_can_be_chosen_nothing_is_raced(data):
    backbone = backbone_of(random_vit(depth=3))
    space = Space.of(backbone, MacCost.of_backbone(backbone))
    budget = 0.5 * space.cost.of_schedule(None)
    subject = Known(torch.zeros(3), random_vit(depth=3))
    simple = Start(starts(space, budget)[0], even_split(space))
    assert many(subject, data).begin(space, budget, fast.OPERATOR, simple, 4000, seed=0) is simple
    assert not subject.calls
    subject.classifies = False
    assert many(subject, data).count(space, 100_000) == 0


def test_a_race_takes_a_part_of_the_descent_and_short_ones_have_none(space, budget, data):
    chooser = many(Known(torch.zeros(6), random_vit(depth=6)), data)
    counts = [chooser.count(space, steps) for steps in (10, 60, 90, 200, 10_000)]
    assert counts == [0, 128, 128, 256, best_of_many.MOST]
    for steps, count in zip((60, 90, 200), counts[1:4], strict=True):
        images = sum(n * size * (last - first) for n, size, first, last in chooser._rounds(count))
        assert images <= 0.75 * steps * 40 * (1 + 8 / 2)
    simple = Start(starts(space, budget)[0], even_split(space))
    assert chooser.begin(space, budget, fast.OPERATOR, simple, 10, seed=0) is simple


def test_an_operator_that_prunes_and_merges_affords_more_shapes_of_all_splits(
    space, budget, data, monkeypatch
):
    simple, drawn = Start(starts(space, budget)[0], even_split(space)), []
    chooser = many(KnownSplit(None, random_vit(depth=6)), data)
    real = best_of_many.schedule_of

    def watched(counts, space, operator, shares):
        drawn.append(shares.unique().tolist())
        return real(counts, space, operator, shares)

    monkeypatch.setattr(best_of_many, "schedule_of", watched)
    found = []
    for operator in (fast.OPERATOR, diffrate.Operator()):
        drawn.clear()
        chooser.begin(space, budget, operator, simple, 70, seed=0)
        found.append([each for (each,) in drawn[1:-2]])  # without the simple one, the mean, and it again
    assert list(map(len, found)) == [128, 256]
    assert found[1][:6] == [0.0, 0.25, 0.5, 0.75, 1.0, 0.0]


@pytest.mark.parametrize("processes", [3, 17])  # of so many, one has no image of the first
def test_processes_share_the_images(space, budget, data, processes):
    model = random_vit(depth=6)
    schedules = [
        fast.schedule_of(rounded(counts, budget, space), space, fast.OPERATOR)
        for counts in random_starts(space, budget, 3, seed=0)
    ]
    for part in ((16, 0, 1), (16, 1, 2)):
        alone = many(Subject(model), data)._divergences(schedules, *part)
        shares = [
            many(Subject(model), data, process_index=i, num_processes=processes)._divergences(
                schedules, *part
            )
            for i in range(processes)
        ]
        assert (alone > 0).all()
        torch.testing.assert_close(torch.stack(shares).sum(0), alone, rtol=1e-4, atol=1e-8)


def test_a_given_start_is_where_a_search_begins(data, monkeypatch):
    model = random_vit(depth=4)
    begun, asked = [], []

    def begin(self, space, budget, operator, simple, steps, seed):
        asked.append((operator, steps))
        return simple

    class StoppedError(Exception):
        pass

    def made(subject, space, operator, budget, steps, start, *rest):
        begun.append(start)
        raise StoppedError

    monkeypatch.setattr(BestOfMany, "begin", begin)
    monkeypatch.setattr(fast, "FastRecipe", made)
    given = diffrate.Schedule([65, 45, 35, 1], [65, 40, 30, 1])
    budget = 1.001 * diffrate.gmacs(model, given)
    for start in (given, None):
        with pytest.raises(StoppedError):
            diffrate.search(model, data, budget, start=start, steps=6, batch_size=8, progress=False)
    assert [steps for _, steps in asked] == [6]
    assert asked[0][0].choice == fast.OPERATOR.choice
    assert begun[0].counts.round().tolist() == [65, 40, 30, 1]
    assert begun[0].shares.tolist() == pytest.approx([(5 + 0.5) / (25 + 1), (5 + 0.5) / (10 + 1)])
    assert begun[1].shares.tolist() == [0.5, 0.5]
