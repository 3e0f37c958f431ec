"""Where a descent begins: random shapes, and the best of many of them."""

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
from diffrate.searching.budget import Space, rounded
from diffrate.searching.images import SearchImages
from diffrate.searching.report import Progress
from diffrate.searching.starts import random_starts, starts
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
            kept = torch.tensor(schedule.merge, dtype=torch.float64)
            self.calls.append(images[:, 0, 0, 0].tolist())
            noise = images.flatten(1).sum(1).double() * (kept.sum() + kept[1]) * 1e3
            return ((kept - self.best).square().mean() + 30 * noise.sin())[:, None]

        return answers

    def divergence(self, teacher, answers, temperature=None):
        return answers[:, 0]


def many(subject, data, batch_size=40, **accelerator):
    images = SearchImages(data, data, 0.2, seed=0, views=4)
    processes = SimpleNamespace(
        **{"process_index": 0, "num_processes": 1, "device": torch.device("cpu")} | accelerator,
        autocast=Accelerator(cpu=True).autocast,
    )
    bar = Progress(False)
    bar.start("", 1, 0)
    return BestOfMany(subject, images, batch_size, processes, 0, lambda sums: sums, bar)


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


def test_the_mean_of_the_best_is_near_the_best_there_is(space, data):
    """From images whose noise is as large as what lies between most shapes."""
    budget = 0.5 * space.cost.of_schedule(None)
    best = torch.tensor([65.0, 60, 35, 15, 5, 1], dtype=torch.float64)
    simple = starts(space, budget)[1]
    subject = Known(best, random_vit(depth=6))
    chooser = many(subject, data)
    steps = 400
    count = chooser.count(space, steps)
    assert count == best_of_many.MOST
    found = chooser.begin(space, budget, fast.OPERATOR, simple, steps, seed=0)
    assert float(space.gmacs(found)) == pytest.approx(budget, rel=1e-3)

    def distance(counts):
        return float((torch.tensor(rounded(counts, budget, space)) - best).square().mean())

    drawn = random_starts(space, budget, count - 1, seed=0)
    assert distance(found) < 0.5 * distance(simple)
    assert distance(found) < sorted(map(distance, drawn))[count // 20]
    assert len(subject.calls) == 2 * (count - LEFT)
    lengths = [8, 8, 16, 32, 64, 128]
    parts = [
        subject.calls[count * 2 - (2 * count >> i)] for i in range(len(lengths))
    ]  # of each part, the first call
    assert [len(part) for part in parts] == lengths
    assert len(set(parts[0] + parts[1] + parts[2])) == 32  # no image of the 32 came twice before all had come


def test_a_race_takes_a_part_of_the_descent_and_short_ones_have_none(space, data):
    chooser = many(Known(torch.zeros(6), random_vit(depth=6)), data)
    counts = [chooser.count(space, steps) for steps in (10, 60, 100, 200, 10_000)]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == best_of_many.MOST
    for steps, count in zip((60, 100, 200), counts[1:4], strict=True):
        passes = 8 * count * (count // LEFT).bit_length() / 2
        assert passes <= 0.25 * steps * 40 * 6 / 2
    simple = starts(space, 0.5 * space.cost.of_schedule(None))[0]
    assert chooser.begin(space, 0.02, fast.OPERATOR, simple, 10, seed=0) is simple


def test_processes_share_the_images(space, data):
    model = random_vit(depth=6)
    budget = 0.5 * space.cost.of_schedule(None)
    candidates = random_starts(space, budget, 3, seed=0)
    for seen in (0, 16):
        alone = many(Subject(model), data)._divergences(candidates, space, budget, fast.OPERATOR, seen)
        parts = [
            many(Subject(model), data, process_index=i, num_processes=3)._divergences(
                candidates, space, budget, fast.OPERATOR, seen
            )
            for i in range(3)
        ]
        assert (alone > 0).all()
        torch.testing.assert_close(torch.stack(parts).sum(0), alone, rtol=1e-4, atol=1e-8)


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
    given = diffrate.Schedule([65, 40, 30, 1], [65, 40, 30, 1])
    budget = 1.001 * diffrate.gmacs(model, given)
    for start in (given, None):
        with pytest.raises(StoppedError):
            diffrate.search(model, data, budget, start=start, steps=6, batch_size=8, progress=False)
    assert len(asked) == 1
    assert begun[0].round().tolist() == [65, 40, 30, 1]
