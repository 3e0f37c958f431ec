"""The divergence that a search makes small, and the descent on its slopes."""

import pytest
import torch

from conftest import random_vit
from diffrate.backbones import backbone_of
from diffrate.costs.macs import MacCost
from diffrate.searching import fast
from diffrate.searching.budget import Space, project
from diffrate.searching.descent import Descent
from diffrate.searching.pace import Pace
from diffrate.searching.split import even_split
from diffrate.searching.starts import Start, starts
from diffrate.searching.subject import Subject, kl


def test_divergence_is_kl():
    teacher, student = torch.randn(5, 7), torch.randn(2, 5, 7)
    wanted = torch.stack(
        [
            torch.nn.functional.kl_div(s.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)
            for s in student
        ]
    )
    torch.testing.assert_close(kl(teacher, student), wanted)


@pytest.mark.parametrize("apart", [1e-3, 0.1, 5.0, 200.0])
def test_small_and_large_divergences_survive_rounding(apart):
    teacher = 3 * torch.randn(50, 10)
    student = teacher + apart * torch.randn(50, 10)
    p, q = (each.double().log_softmax(-1) for each in (teacher, student))
    found = kl(teacher, student)
    assert (found >= 0).all()
    torch.testing.assert_close(found.double(), (p.exp() * (p - q)).sum(-1), rtol=1e-2, atol=1e-12)


def test_descent_finds_the_optimum_of_a_known_loss():
    """Loss sum(weight / count): at the optimum, weight / count^2 is proportional to the cost of a token."""
    backbone = backbone_of(random_vit(depth=6))
    space = Space.of(backbone, MacCost.of_backbone(backbone))
    budget = 0.6 * space.cost.of_schedule(None)
    weight = torch.tensor([0.0, 9.0, 8.0, 4.0, 1.0, 0.0], dtype=torch.float64)
    start = torch.tensor([65.0, 40, 40, 40, 40, 1], dtype=torch.float64)
    descent = Descent(start, budget, space, Pace(400, last=0.02), relative=0.5)
    for _ in range(400):
        descent.update(-weight / descent.counts.square())
    found = descent.answer()
    ratio = (weight / found.square() / descent.cost_gradient())[1:5]
    assert float(space.gmacs(found)) == pytest.approx(budget, rel=1e-3)
    assert (ratio / ratio.mean()).tolist() == pytest.approx([1] * 4, rel=0.1)


def test_the_answer_is_the_mean_of_the_last_part_of_the_way():
    backbone = backbone_of(random_vit(depth=6))
    space = Space.of(backbone, MacCost.of_backbone(backbone))
    budget = 0.6 * space.cost.of_schedule(None)
    start = project(torch.tensor([65.0, 50, 40, 30, 20, 1]).double(), budget, space, space.freely())
    descent = Descent(start, budget, space, Pace(10), relative=0.5)
    for step in range(10):
        descent.update(torch.tensor([0.0, -1, 1, -1, 1, 0], dtype=torch.float64) * (-1) ** (step // 3))
    mean = torch.tensor(descent.path[3:], dtype=torch.float64).mean(dim=0)
    torch.testing.assert_close(
        descent.answer(), project(mean, budget, space, descent.along_budget()), rtol=1e-6, atol=1e-4
    )
    whole = torch.tensor(descent.path, dtype=torch.float64).mean(dim=0)
    assert float((mean - whole).abs().max()) > 0.1


def test_steps_and_seeds_measure_other_schedules():
    backbone = backbone_of(random_vit(depth=6))
    space = Space.of(backbone, MacCost.of_backbone(backbone))
    budget = 0.6 * space.cost.of_schedule(None)

    class Flat(Subject):
        """Its answers are the same under all schedules, so that counts stay; remembers them."""

        def under_many(self, schedules, images):
            seen.append([each.merge for each in schedules])
            return torch.zeros(len(schedules), len(images), 7)

        def divergence(self, teacher, answers, temperature=None):
            return answers[..., 0]

    def course(seed):
        subject = Flat(random_vit(depth=6))
        start = Start(starts(space, budget)[0], even_split(space))
        return fast.FastRecipe(subject, space, fast.OPERATOR, budget, 4, start, seed, lambda sums: sums)

    seen: list[list[tuple[int, ...]]] = []
    for each in (course(0), course(0), course(1)):
        for _ in range(2):
            each.step(torch.randn(2, 3, 32, 32), torch.zeros(2))
    assert seen[0] != seen[1]  # one step and the next
    assert seen[:2] == seen[2:4]  # the same search again
    assert seen[0] != seen[4]  # another seed
