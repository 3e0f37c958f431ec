"""Measured slopes: every variant in the shared walk gives what a model compressed by it gives."""

import pytest
import torch

import diffrate
from conftest import random_vit
from diffrate.backbones import backbone_of
from diffrate.compressed import checked_operator
from diffrate.costs.macs import MacCost
from diffrate.operator import Operator
from diffrate.searching.budget import Space
from diffrate.searching.descent import Descent, perturbed
from diffrate.searching.fast import OPERATOR
from diffrate.searching.slopes import variant_logits
from diffrate.searching.subject import kl

CASES = {
    "each block up or down": ([65, 60, 50, 40, 30, 1], [65, 62, 44, 42, 24, 1]),
    "a plateau that falls": ([65, 65, 65, 65, 30, 1], [65, 60, 65, 50, 40, 1]),
    "nothing changes": ([65, 60, 50, 40, 30, 1], [65, 60, 50, 40, 30, 1]),
    "below all later counts": ([65, 50, 50, 50, 50, 1], [65, 20, 45, 50, 30, 1]),
}


@pytest.mark.parametrize(("kept", "changed"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    "operator",
    [OPERATOR, Operator(), Operator(operation="prune"), OPERATOR.changed(memory=0.3)],
    ids=["fast", "paper", "prune", "memory"],
)
def test_variants_equal_separate_models(kept, changed, operator):
    model = random_vit(depth=6)
    images = torch.randn(3, 3, 32, 32)
    operator = checked_operator(operator, backbone_of(model).layout)
    with torch.no_grad():
        got = variant_logits(backbone_of(model), images, kept, changed, operator)
        for variant in range(len(kept) + 1):
            counts = list(kept)
            if variant:
                counts[variant - 1] = changed[variant - 1]
            schedule = diffrate.Schedule(counts, counts, operator=operator).effective
            torch.testing.assert_close(
                got[variant], diffrate.compress(model, schedule)(images), rtol=1e-4, atol=1e-4
            )


def test_blocks_past_the_given_ones_are_left_alone():
    model = random_vit(depth=6, global_pool="avg")
    images = torch.randn(2, 3, 32, 32)
    operator = checked_operator(OPERATOR, backbone_of(model).layout)
    with torch.no_grad():
        got = variant_logits(backbone_of(model), images, [65, 60, 50, 40, 30], [65, 60, 50, 40, 36], operator)
        for variant, last in ((0, 30), (5, 36)):
            schedule = diffrate.Schedule(
                [65, 60, 50, 40, last, last], [65, 60, 50, 40, last, last], operator=operator
            )
            torch.testing.assert_close(
                got[variant], diffrate.compress(model, schedule)(images), rtol=1e-4, atol=1e-4
            )


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


def test_perturbations_stay_between_neighbours_where_they_can():
    backbone = backbone_of(random_vit(depth=6))
    space = Space.of(backbone, MacCost.of_backbone(backbone))
    kept = [65, 65, 50, 49, 30, 1]
    for up in ([True] * 6, [False] * 6):
        changed = perturbed(kept, space, 0.1, up)
        assert changed[0] == 65
        assert changed[5] == 1
        assert all(changed[i] != kept[i] for i in range(1, 5))
        for i in (2, 4):
            assert kept[i + 1] <= changed[i] <= kept[i - 1]
    assert perturbed(kept, space, 0.1, [True] * 6)[2] == 55
    assert perturbed(kept, space, 0.1, [False] * 6)[4] == 27
    level = perturbed([65, 50, 50, 50, 50, 1], space, 0.1, [True] * 6)
    assert level[2] == level[3] == 45  # level with both neighbours: only down


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
