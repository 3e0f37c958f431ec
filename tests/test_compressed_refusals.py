"""What a compressed model refuses: schedules, checkpoints, inputs and models that do not fit."""

import pytest
import timm
import torch
from torch import nn

import diffrate
from conftest import SMALL, build, shrinking
from diffrate import Schedule, ScheduleError, UnsupportedModelError

pytestmark = pytest.mark.usefixtures("no_grad")


def test_wrong_checkpoints_are_refused():
    model = build()
    state = model.state_dict()
    state["unknown"] = state.pop("norm.weight")
    with pytest.raises(RuntimeError, match=r"Missing key.*norm\.weight"):
        diffrate.compress(model).load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "schedule", "sentence"),
    [
        ({}, Schedule([17, 9], [17, 9]), "schedule has 2 blocks and the model has 4"),
        ({}, Schedule([18, 9, 9, 9], [18, 9, 9, 9]), "starts from 18 tokens and the model has 17"),
        (
            {"reg_tokens": 3},
            Schedule([20, 9, 9, 3], [20, 9, 9, 3]),
            "as few as 3 tokens, but the model's 4 prefix",
        ),
        (
            {"global_pool": "avg"},
            Schedule([17, 9, 9, 1], [17, 9, 9, 1]),
            "leaves no image token, and this model's head looks at image tokens",
        ),
    ],
)
def test_schedules_that_do_not_fit(changes, schedule, sentence):
    model = build(**changes)
    with pytest.raises(ScheduleError, match=sentence):
        diffrate.compress(model, schedule)
    with pytest.raises(ScheduleError, match=sentence):
        diffrate.gmacs(model, schedule)


@pytest.mark.parametrize("importance", ["class-attention", "class-attention-value"])
def test_class_importance_needs_a_class_token(importance):
    model = build(global_pool="avg", class_token=False)
    assert diffrate.compress(model).operator.importance == "image-attention"
    with pytest.raises(ScheduleError, match=r"needs a class token.* use image-attention"):
        diffrate.compress(model, importance=importance)


def test_another_input_size_of_a_fixed_model():
    model = build()
    with pytest.raises(AssertionError, match="Input"):
        diffrate.compress(model, shrinking(model))(torch.randn(1, 3, 64, 64))


def test_families_of_which_nothing_is_known_are_refused():
    model = timm.create_model("regnetx_002")
    with pytest.raises(UnsupportedModelError, match="regnetx_002 cannot be compressed: supported are"):
        diffrate.compress(model)
    with pytest.raises(UnsupportedModelError, match="Linear cannot be compressed: supported are"):
        diffrate.compress(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"patch_drop_rate": 0.5}, "patch dropout"),
        (
            {"block_fn": timm.models.vision_transformer.ParallelScalingBlock},
            "block 0 is a ParallelScalingBlock",
        ),
    ],
    ids=["patch dropout", "parallel blocks"],
)
def test_models_that_do_not_fit_are_refused_by_name(changes, reason):
    with pytest.raises(UnsupportedModelError, match=f"vit_tiny_patch16_224 cannot be compressed: .*{reason}"):
        diffrate.compress(build(**changes))


def test_a_model_with_its_own_forward_or_parts_is_refused():
    class Mine(timm.models.vision_transformer.VisionTransformer):
        pass

    with pytest.raises(UnsupportedModelError, match="Mine"):
        diffrate.compress(Mine(**SMALL))
    model = build()
    model.blocks[2].attn.adapter = nn.Linear(32, 32)
    with pytest.raises(UnsupportedModelError, match="block 2 has parts that are not known here: adapter"):
        diffrate.compress(model)
