"""The paper's schedules: found by name and budget, listed where there is none, marked where they are borrowed."""

import pytest
import timm
import torch

import diffrate
from diffrate import DiffRateError, Schedule, published


def built(name, **changes):
    with torch.device("meta"):
        return timm.create_model(name, **changes)


def test_lookup_by_name():
    schedule = Schedule.published("deit_small_patch16_224", gmacs=2.9)
    assert (schedule.depth, schedule.tokens, schedule.prefix) == (12, 197, 1)
    assert schedule.cost == {"paper_gmacs": 2.9}
    assert schedule.made["family"] == "ViT-S-DeiT"
    assert schedule.img_size == (224, 224)
    assert Schedule.published("hf_hub:timm/deit_small_patch16_224.fb_in1k", 2.9).merge == schedule.merge
    assert Schedule.published("deit_small_patch16_224", 2.3).merge != schedule.merge


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("vit_base_patch16_224.mae", "ViT-B-MAE"),
        ("vit_base_patch16_224", "ViT-B-DeiT"),
        ("vit_base_patch16_224.augreg_in1k", "ViT-B-DeiT"),
        ("deit_base_patch16_224.fb_in1k", "ViT-B-DeiT"),
    ],
)
def test_names_with_and_without_tags(name, family):
    assert Schedule.published(name, 11.5).made["family"] == family


def test_a_budget_that_is_not_published_lists_those_that_are():
    with pytest.raises(
        DiffRateError, match=r"no schedule of 3 GMACs .* there are 2\.3, 2\.5, 2\.7, 2\.9, 3\.1"
    ):
        Schedule.published("deit_small_patch16_224", gmacs=3.0)
    for odd in (float("nan"), float("inf"), -1.0):
        with pytest.raises(DiffRateError, match="there are"):
            Schedule.published("deit_small_patch16_224", gmacs=odd)


@pytest.mark.parametrize(
    "name", ["resnet50", "deit_small_distilled_patch16_224", "deit_small_patch16_2240", ""]
)
def test_a_model_that_is_not_published_lists_those_that_are(name):
    with pytest.raises(DiffRateError, match=r"no schedule is published for .*deit_small_patch16_224"):
        Schedule.published(name, gmacs=2.9)


def test_borrowed_for_a_model_of_the_same_shape_and_said_so():
    model = built("vit_tiny_patch16_224")
    schedule, note = published.for_model(model, "vit_tiny_patch16_224", 0.8)
    assert note is not None
    assert "published for ViT-T-DeiT" in note
    assert "borrowed for vit_tiny_patch16_224" in note
    assert schedule.made["note"] == note
    assert schedule.merge == Schedule.published("deit_tiny_patch16_224", 0.8).merge
    assert schedule.cost["gmacs"] == pytest.approx(0.81, abs=0.005)


def test_not_borrowed_for_the_model_itself():
    schedule, note = published.for_model(built("deit_tiny_patch16_224"), "deit_tiny_patch16_224", 0.8)
    assert note is None
    assert "note" not in schedule.made


def test_a_mean_pooled_model_borrows_from_mae():
    model = built("vit_base_patch16_224", global_pool="avg")
    schedule, note = published.for_model(model, "vit_base_patch16_224", 11.5)
    assert schedule.made["family"] == "ViT-B-MAE"
    assert note is not None


def test_other_shapes_are_refused_with_those_that_there_are():
    for model in (built("vit_tiny_patch16_224", depth=6), built("deit_tiny_distilled_patch16_224")):
        with pytest.raises(
            DiffRateError, match=r"no published schedule fits .*ViT-T-DeiT: 12 blocks, 197 tokens"
        ):
            published.for_model(model, "mine", 0.8)


def test_table_holds_every_schedule_and_ten_of_them_rise():
    rows = published.table()
    assert len(rows) == 31
    rising = [row for row in rows if not Schedule(row["prune"], row["merge"]).is_monotone]
    assert len(rising) == 10
    for row in rows:
        schedule = Schedule.published(row["models"][0], row["gmacs"])
        assert (list(schedule.prune), list(schedule.merge)) == (row["prune"], row["merge"])


def test_mean_pooled_schedules_leave_the_last_block_alone():
    for family in published.FAMILIES:
        for row in (row for row in published.table() if row["family"] == family.name):
            running = Schedule(row["prune"], row["merge"]).effective
            if family.mean_pooled:
                assert running.prune[-1] == running.merge[-1] == running.merge[-2]


def test_published_schedules_run():
    model = timm.create_model("vit_tiny_patch16_224", embed_dim=12, num_heads=2, num_classes=3).eval()
    schedule = Schedule.published("deit_tiny_patch16_224", 0.6)
    with torch.no_grad():
        _, tokens = diffrate.compress(model, schedule)(torch.randn(1, 3, 224, 224), return_tokens=True)
    assert tokens.count == schedule.effective.merge[-1]
