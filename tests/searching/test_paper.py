"""The paper's recipe: what its counts cost with gradients for all of them, and that the two counts of a block part."""

import pytest
import torch

import diffrate
from conftest import random_vit
from diffrate.costs.base import Costs
from diffrate.operator import Operator
from diffrate.searching.budget import Space
from diffrate.searching.paper import PaperRecipe
from diffrate.searching.subject import Subject


def recipe(operation="prune-merge", share=0.6):
    model = random_vit(depth=5)
    subject = Subject(model)
    space = Space.of(subject.backbone, Costs([subject.cost()]))
    operator = Operator("class-attention", operation)
    return PaperRecipe(model, space, operator, share * diffrate.gmacs(model), 5, lambda sums: sums)


def test_costs_are_those_of_what_runs_and_both_counts_have_their_blocks_gradient():
    made = recipe()
    prune = torch.tensor([60.0, 30.0, 40.0, 20.0], requires_grad=True)
    merge = torch.tensor([50.0, 35.0, 45.0, 25.0], requires_grad=True)
    cost = made.price(prune, merge)["gmacs"]
    kept = [65, 61, 31, 41, 21], [65, 51, 36, 46, 26]
    schedule = diffrate.Schedule(*kept, 1).effective
    assert schedule.merge == (65, 51, 31, 31, 21)
    assert cost.item() == pytest.approx(diffrate.gmacs(made.model, schedule))
    by_prune, by_merge = torch.autograd.grad(cost, (prune, merge))
    assert torch.equal(by_prune, by_merge)
    assert by_prune.min() > 0
    running = torch.tensor([50.0, 30.0, 30.0, 20.0], requires_grad=True)
    counts = torch.cat([torch.tensor([65.0]), running + 1])
    (by_block,) = torch.autograd.grad(made.space.cost.price(counts.double())["gmacs"], running)
    torch.testing.assert_close(by_prune, by_block)


def test_counts_that_begin_as_one_part():
    made = recipe()
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 7
    assert torch.equal(made.prune.logits, made.merge.logits)
    for _ in range(3):
        made.step(images, labels)
    apart = (made.prune.logits - made.merge.logits).abs().amax(dim=1)
    assert (apart[:-1] > 1e-3).all()  # nothing attends after the last block: its counts see costs alone


@pytest.mark.parametrize("operation", ["prune", "merge"])
def test_one_operation_alone_learns_one_count_a_block(operation):
    made = recipe(operation)
    made.step(torch.randn(8, 3, 32, 32), torch.arange(8) % 7)
    assert not made.prune.logits.any()
    assert (made.merge.logits.abs().amax(dim=1) > 1e-3).all()
    schedule = made.present()
    assert schedule.prune == schedule.merge
