"""The divergence that a search makes small, and the descent on its slopes."""

import pytest
import torch

from conftest import random_vit
from diffrate.backbones import backbone_of
from diffrate.costs.macs import MacCost
from diffrate.searching.budget import Space
from diffrate.searching.descent import Descent
from diffrate.searching.subject import kl


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
    descent = Descent(start, budget, space, steps=400, first_step=1.0, last_step=0.02, relative=0.5)
    for _ in range(400):
        descent.update(-weight / descent.counts.square())
    found = descent.answer()
    ratio = (weight / found.square() / descent.cost_gradient())[1:5]
    assert float(space.gmacs(found)) == pytest.approx(budget, rel=1e-3)
    assert (ratio / ratio.mean()).tolist() == pytest.approx([1] * 4, rel=0.1)
