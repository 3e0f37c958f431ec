"""Many schedules in one walk answer as each does by itself, and share what they have in common."""

import pytest
import torch

import diffrate
from conftest import random_vit
from diffrate import blocks
from diffrate.backbones import backbone_of
from diffrate.methods.schedules import random_schedules
from diffrate.operator import Operator
from diffrate.searching import many
from diffrate.searching.fast import OPERATOR

KEPT = [
    [65, 60, 50, 40, 30, 1],
    [65, 60, 50, 40, 20, 1],
    [65, 60, 50, 40, 30, 1],  # again
    [65, 65, 65, 65, 65, 65],  # nothing removed
    [65, 65, 65, 65, 65, 1],
    [65, 60, 60, 60, 60, 60],  # and no more from the third block on
    [65, 60, 48, 55, 30, 1],  # not monotone: 48 in both blocks
    [65, 30, 20, 10, 5, 5],
    [65, 60, 50, 40, 30, 20],  # where all tokens count, the last block removes some too
]


@pytest.mark.parametrize("pooled", ["token", "avg"])
@pytest.mark.parametrize(
    "operator",
    [OPERATOR, Operator(), Operator(operation="prune"), OPERATOR.changed(memory=0.3, floor=1.0)],
    ids=["fast", "paper", "prune", "memory and floor"],
)
def test_every_schedule_answers_as_by_itself(operator, pooled):
    model = random_vit(depth=6, global_pool=pooled)
    images = torch.randn(3, 3, 32, 32)
    schedules = [
        diffrate.Schedule(kept, kept, operator=operator) for kept in KEPT if kept[-1] > 1 or pooled == "token"
    ]
    schedules += random_schedules(model, 0.6 * diffrate.gmacs(model), range(5), operator)
    assert any(each.prune != each.merge for each in schedules)
    schedules.append(diffrate.Schedule([65, 40, 60, 30, 20, 10], [65, 50, 30, 28, 25, 10], operator=operator))
    with torch.no_grad():
        got = many.logits_of_many(backbone_of(model), images, schedules)
        for each, schedule in zip(got, schedules, strict=True):
            torch.testing.assert_close(each, diffrate.compress(model, schedule)(images), rtol=1e-4, atol=1e-5)
    assert len({tuple(each.flatten().tolist()) for each in got}) > len(schedules) // 2


def test_common_blocks_run_once(monkeypatch):
    ran = {"attend": 0, "reduce": 0, "prefix": 0}

    def counted(name, run):
        def wrapped(*given):
            ran[name] += 1
            return run(*given)

        return wrapped

    monkeypatch.setattr(many, "attend_and_rank", counted("attend", blocks.attend_and_rank))
    monkeypatch.setattr(many, "reduce_and_finish", counted("reduce", blocks.reduce_and_finish))
    monkeypatch.setattr(many, "run_block_for_prefix", counted("prefix", blocks.run_block_for_prefix))
    model = random_vit(depth=6)
    kept = [[65, 60, 50, 40, 30, 1], [65, 60, 44, 40, 30, 1], [65, 60, 50, 40, 20, 1]]
    with torch.no_grad():
        many.logits_of_many(
            backbone_of(model),
            torch.randn(2, 3, 32, 32),
            [diffrate.Schedule(k, k, operator=OPERATOR) for k in kept],
        )
    # The second block and the third one's attention in common, then two ways: the fourth block's attention for 50 and
    # for 44 tokens, and from its end on side by side in one batch, until the fifth block parts 30 tokens from 20.
    assert ran == {"attend": 1 + 1 + 2 + 1, "reduce": 1 + 2 + 2 + 2, "prefix": 2}


def test_groups_are_of_schedules_that_share_blocks():
    kept = [[65, 60, 50], [65, 40, 30], [65, 60, 44], [65, 40, 20]]
    assert many.in_order([diffrate.Schedule(k, k) for k in kept]) == [3, 1, 2, 0]


def test_other_image_sizes_run_in_proportion_as_by_themselves():
    model = random_vit(depth=4, dynamic_img_size=True)
    schedules = [diffrate.Schedule(kept, kept, operator=OPERATOR) for kept in ([65, 50, 30, 1], [65] * 4)]
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        got = many.logits_of_many(backbone_of(model), images, schedules)
        for each, schedule in zip(got, schedules, strict=True):
            wanted = diffrate.compress(model, schedule)(images)
            torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-5)


def test_schedules_of_other_models_are_refused():
    backbone, images = backbone_of(random_vit(depth=4)), torch.randn(2, 3, 32, 32)
    for kept, reason in (([65, 60, 50], "3 blocks"), ([33, 30, 20, 10], "33 tokens")):
        with pytest.raises(diffrate.ScheduleError, match=reason):
            many.logits_of_many(backbone, images, [diffrate.Schedule(kept, kept)])
    first = backbone.start(images)
    longer = first.with_features(first.x[:, :1].expand(-1, 145, -1))
    with pytest.raises(diffrate.ScheduleError, match="this input gives 145"):
        many.branches(backbone, longer, [diffrate.Schedule([65] * 4, [65] * 4)])


def test_several_operators_are_refused():
    model, kept = random_vit(depth=3), [65, 60, 50]
    schedules = [diffrate.Schedule(kept, kept, operator=o) for o in (Operator(), OPERATOR)]
    with pytest.raises(diffrate.ScheduleError, match="one operator"):
        many.logits_of_many(backbone_of(model), torch.randn(2, 3, 32, 32), schedules)
    same = [Operator(), Operator(importance="class-attention")]  # "auto" is that here
    schedules = [diffrate.Schedule(kept, kept, operator=operator) for operator in same]
    assert len(many.logits_of_many(backbone_of(model), torch.randn(2, 3, 32, 32), schedules)) == 2
