"""reproduce/schedule_comparison.py: the race of schedules ends as a full evaluation would, in any process."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import diffrate
from conftest import random_vit
from diffrate import Operator
from diffrate.methods.schedules import random_schedules
from diffrate.searching import fast


def test_the_race_ends_as_a_full_evaluation_does(load, monkeypatch: pytest.MonkeyPatch) -> None:
    module: ModuleType = load("schedule_comparison")
    torch.manual_seed(0)
    model = random_vit(depth=6)
    images, labels = torch.randn(40, 3, 32, 32), torch.randint(7, (40,))
    cost = diffrate.gmacs(model)
    schedules = random_schedules(model, 0.7 * cost, range(10)) + random_schedules(model, 0.3 * cost, range(5))
    references = random_schedules(model, 0.7 * cost, [99, 98])
    monkeypatch.setitem(load("many_schedules").AT_ONCE, "cpu", 16)
    many = load("many_schedules").ManySchedules(model, images, labels)

    def measured(schedule: diffrate.Schedule) -> list[float]:
        with torch.no_grad():
            answers, whole = diffrate.compress(model, schedule)(images), model(images)
        loss = F.cross_entropy(answers, labels).item()
        return [
            loss,
            F.kl_div(answers.log_softmax(-1), whole.softmax(-1), reduction="batchmean").item(),
        ]

    def better(than: list[diffrate.Schedule], some: list[int]) -> list[list[int]]:
        theirs = map(measured, than)
        return [[sum(all_of[i][by] < their[by] for i in some) for by in range(2)] for their in theirs]

    all_of = [measured(schedule) for schedule in schedules]
    monkeypatch.setattr(module, "FIRST", {"cpu": 8})
    monkeypatch.setattr(module, "SURELY", float("inf"))  # nobody is out early
    full = module.race(many, references, schedules)
    assert full.entered == [15, 15, 15, 15]
    assert full.images == [8, 16, 32, 40]
    assert full.better == better(references, list(range(15)))
    halves = [many.each([*references, *schedules], slice(0, 40))[..., i::2].mean(-1) for i in range(2)]
    lower = [(half[2:, None] < half[:2]).long() for half in halves]  # (S, R, measures) each
    assert full.twice == (lower[0] * lower[1]).sum(0).tolist()
    assert full.twice != full.better
    torch.testing.assert_close(torch.tensor(full.own), torch.tensor([measured(r) for r in references]))
    assert full.best == [min(range(15), key=lambda i: all_of[i][by]) for by in range(2)]
    assert full.out == []
    assert full.complete
    monkeypatch.setattr(module, "SURELY", 1.0)
    short = module.race(many, references, schedules)
    assert short.entered[-1] < 15
    assert len(short.out) >= 15 - short.entered[-1]
    audited, missed = module.audit(many, references, [schedules[i] for i in short.out])
    assert (audited, missed) == (len(short.out), better(references, short.out))
    together = [
        [a + b for a, b in zip(*rows, strict=True)] for rows in zip(short.better, missed, strict=True)
    ]
    assert together == full.better
    worse = max(range(15), key=lambda i: all_of[i][0])  # one that the others beat
    _, missed = module.audit(many, [schedules[worse]], schedules)
    assert missed == better([schedules[worse]], list(range(15)))
    assert missed[0][0] == 14
    assert module.audit(many, references, []) == (0, [[0, 0], [0, 0]])
    monkeypatch.setattr(module, "AUDITED", 4)
    assert module.audit(many, references, schedules)[0] == 4


def test_what_an_audit_says_of_those_that_left(load) -> None:
    most_missed = load("schedule_comparison").most_missed
    # 5 of 10 were looked at, and none is better. Were 3 better, that had a chance of 21 / 252; were 4, 6 / 252.
    assert most_missed(10, 5, 0) == 3
    assert most_missed(100, 100, 3) == 3  # all were looked at
    assert most_missed(3553, 500, 0) == 19  # as of 3553 / 500 x 3, but without putting back
    assert most_missed(0, 0, 0) == 0
    assert most_missed(7, 0, 0) == 7  # none was looked at, as where time ended a race


def test_later_searches_take_the_first_ones_operator(load, monkeypatch: pytest.MonkeyPatch) -> None:
    module, asked = load("schedule_comparison"), []
    model = random_vit(depth=4)
    operator = Operator(operation="merge", choice="cost", floor=1.0)
    first = random_schedules(model, 0.7 * diffrate.gmacs(model), [0], operator)[0]

    class StoppedError(Exception):
        pass

    def search(
        budget: float, seed: int = 0, operator: Operator | None = None
    ) -> tuple[diffrate.Schedule, float]:
        asked.append((seed, operator))
        return replace(first, operator=operator or first.operator), 1.0

    def no_more(*_: object, **__: object) -> None:
        raise StoppedError

    setting = Namespace(
        search=search, budgets=[0.7 * diffrate.gmacs(model)], model=model, device=torch.device("cpu"), tables={},
        val=[(torch.randn(4, 3, 32, 32), torch.zeros(4))],
    )  # fmt: skip
    monkeypatch.setattr(module.Table, "measure", no_more)
    with pytest.raises(StoppedError):
        module.run(setting, 3, seeds=3)
    assert asked == [(0, None), (1, first.operator), (2, first.operator)]


def test_searches_that_prune_are_asked_to(load) -> None:
    asked, found = [], Namespace(operator="its own")

    def search(budget: float, seed: int = 0, operator: object = None) -> tuple[Namespace, float]:
        asked.append((seed, operator))
        return found, 1.0

    load("schedule_comparison").searched(Namespace(search=search), 1.0, 2, Operator(operation="prune"))
    assert asked == [(0, Operator(operation="prune")), (1, "its own")]


def test_schedules_that_are_given_race_at_their_own_budget_and_others_are_searched_for(
    load, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, model = load("schedule_comparison"), random_vit(depth=4)
    whole = diffrate.gmacs(model)
    loose, tight = (random_schedules(model, share * whole, [0])[0] for share in (0.8, 0.6))
    raced, searched, controls = [], [], []
    monkeypatch.setattr(module, "at_budget", lambda *a: (raced.append((a[2], a[3])), controls.append(a[5])))
    monkeypatch.setattr(
        module, "searched", lambda _, budget, seeds, how: searched.append((budget, seeds, how)) or [loose]
    )
    setting = Namespace(
        budgets=[0.8 * whole, 0.6 * whole], model=model, device=torch.device("cpu"), tables={},
        val=[(torch.randn(4, 3, 32, 32), torch.zeros(4))],
    )  # fmt: skip
    module.run(setting, 3, [tight], seeds=2)
    assert raced == [(0.6 * whole, [tight]), (0.8 * whole, [loose])]
    assert searched == [(0.8 * whole, 2, None)]
    module.run(setting, 3, [tight], seeds=2, operation="prune")
    assert searched[1:] == [(0.8 * whole, 2, Operator(operation="prune"))]
    raced.clear()
    controls.clear()
    module.run(setting, 3, [tight], operation="prune-merge", control=False)
    assert controls == [False, False]
    assert raced == [(0.6 * whole, [tight]), (0.8 * whole, [loose])]
    assert searched[2:] == [(0.8 * whole, 1, Operator())]
    setting.budgets = [0.7 * whole]
    with pytest.raises(diffrate.DiffRateError, match=r"a schedule costs .* GMACs, not "):
        module.run(setting, 3, [tight])


def test_an_image_counts_by_the_mean_of_both_views(load, monkeypatch: pytest.MonkeyPatch) -> None:
    module, model = load("schedule_comparison"), random_vit(depth=4)
    given = random_schedules(model, 0.6 * diffrate.gmacs(model), [0, 1])
    seen = []
    monkeypatch.setattr(module, "at_budget", lambda *a: seen.append((a[1].each(given, slice(0, 3)), a[6])))
    images, labels = torch.randn(4, 3, 32, 32), torch.randint(7, (4,))

    def raced(images: torch.Tensor, both_views: bool) -> torch.Tensor:
        setting = Namespace(
            budgets=[0.6 * diffrate.gmacs(model)], model=model, device=torch.device("cpu"), tables={},
            val=[(images[:3], labels[:3]), (images[3:], labels[3:])],
        )  # fmt: skip
        module.run(setting, 3, given, both_views=both_views)
        found, told = seen.pop()
        assert told is both_views
        return found

    plain, mirrored = raced(images, False), raced(images.flip(-1), False)
    assert not torch.allclose(plain, mirrored, atol=1e-4)
    torch.testing.assert_close(raced(images, True), (plain + mirrored) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("control", [True, False])
def test_the_papers_counts_race_where_they_are_asked_to(
    load, monkeypatch: pytest.MonkeyPatch, control: bool
) -> None:
    module, model = load("schedule_comparison"), random_vit(depth=4)
    budget = 0.7 * diffrate.gmacs(model)
    found = random_schedules(model, budget, range(2), fast.OPERATOR)
    papers = random_schedules(model, budget, [2])[0]
    measured, raced = [], []

    class StoppedError(Exception):
        pass

    def race(
        _many: object, references: list[diffrate.Schedule], drawn: list[diffrate.Schedule], _: object
    ) -> None:
        raced.extend(references)
        assert {each.operator for each in drawn} == {fast.OPERATOR}
        raise StoppedError

    monkeypatch.setattr(module, "race", race)
    monkeypatch.setattr(module, "simple_schedules", lambda *_: {"others": papers, module.CONTROL: papers})
    table = Namespace(
        setting=Namespace(model=model, check_time=None), measure=lambda name, *_, **__: measured.append(name)
    )
    with pytest.raises(StoppedError):
        module.at_budget(table, None, budget, found, 3, control)
    assert raced == ([*found, papers] if control else found)
    assert measured == ["search", "search 2", "others", module.CONTROL]


def moments(means: list[float], n: int, deviation: float) -> torch.Tensor:
    return torch.tensor([[m * n for m in means], [(deviation**2 + m * m) * n for m in means]]).double()


def test_who_goes_on_in_the_race(load) -> None:
    module: ModuleType = load("schedule_comparison")
    means = [-0.2, 0.0, 0.4, 0.5]
    sums = moments(means, 101, 2.0)[..., None, None]  # a standard error of 0.2
    assert module.survivors([3, 2, 1, 0], sums, 101) == [2, 1, 0]  # the last is worse by 2.5 of them
    # Of two references and two measures, one that it is not clearly worse than, by one, keeps a schedule in.
    sums = moments([0.5] * 12, 101, 2.0).reshape(2, 3, 2, 2)
    sums[:, 1, 1, 0] = moments([0.4], 101, 2.0)[:, 0]
    assert module.survivors([0, 1, 2], sums, 101) == [1]
    drawn = torch.randn(5000, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = torch.stack([drawn.sum(1), drawn.square().sum(1)])[..., None, None]
    out = 5000 - len(module.survivors(range(5000), sums, 64))
    assert out / 50 == pytest.approx(1.0, rel=0.4)  # percent of those that are no worse


def test_a_race_that_time_ends_counts_what_it_saw(load, monkeypatch: pytest.MonkeyPatch) -> None:
    module: ModuleType = load("schedule_comparison")
    model = random_vit(depth=4)
    images, labels = torch.randn(12, 3, 32, 32), torch.randint(7, (12,))
    schedules = random_schedules(model, 0.7 * diffrate.gmacs(model), range(4))
    many = load("many_schedules").ManySchedules(model, images, labels)
    monkeypatch.setattr(module, "FIRST", {"cpu": 4})
    monkeypatch.setattr(module, "SURELY", float("inf"))
    looks = iter(range(100))

    def check_time() -> None:
        if next(looks) > 0:
            raise module.OutOfTimeError

    ended = module.race(many, schedules[:1], schedules, check_time)
    assert (ended.complete, ended.entered, ended.images) == (False, [4], [4])
    own = many.each(schedules, slice(0, 4)).mean(-1)
    assert ended.better == [(own < own[0]).sum(0).tolist()]
    with pytest.raises(module.OutOfTimeError):
        module.race(many, schedules[:1], schedules, check_time)


def test_processes_have_the_losses_of_each_schedule_alone(load, monkeypatch: pytest.MonkeyPatch) -> None:
    module: ModuleType = load("many_schedules")
    monkeypatch.setattr(module, "EACH", 2)
    model = random_vit(depth=5)
    images, labels = torch.randn(4, 3, 32, 32), torch.randint(7, (4,))
    schedules = random_schedules(
        model, 0.5 * diffrate.gmacs(model), range(5), fast.OPERATOR, last_is_free=True
    )
    with module.ManySchedules(model, images, labels, workers=2) as many:
        found = many.each(schedules, slice(1, 3))
    with torch.no_grad():
        logits = [diffrate.compress(model, schedule)(images[1:3]) for schedule in schedules]
    alone = torch.stack([F.cross_entropy(each, labels[1:3], reduction="none") for each in logits])
    torch.testing.assert_close(found[:, 0], alone.double(), rtol=1e-5, atol=1e-6)
    assert (found[:, 1] > 0).all()
    assert len({tuple(row) for row in found[:, 0].tolist()}) == 5


def test_a_race_goes_on_where_memory_ends(load, monkeypatch: pytest.MonkeyPatch) -> None:
    module: ModuleType = load("many_schedules")
    model = random_vit(depth=3)
    images, labels = torch.randn(4, 3, 32, 32), torch.randint(7, (4,))
    schedules = random_schedules(model, 0.6 * diffrate.gmacs(model), range(3))
    many = module.ManySchedules(model, images, labels)
    whole, at_once, seen = many.each(schedules, slice(0, 4)), module.logits_of_many, []

    def with_little_memory(backbone: object, some: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(len(some))
        if len(some) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return at_once(backbone, some, *rest)

    monkeypatch.setattr(module, "logits_of_many", with_little_memory)
    monkeypatch.setattr(module, "_portions", module.Portions("the race"))
    with pytest.warns(RuntimeWarning, match="the race goes on with 2 at a time"):
        torch.testing.assert_close(many.each(schedules, slice(0, 4)), whole)
    assert seen == [4, 2, 2]
