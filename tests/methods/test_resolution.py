"""Lower resolution: timm's own model for the smaller size must give the same logits."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn
from torchvision.transforms.v2.functional import InterpolationMode
from torchvision.transforms.v2.functional import resize as torchvision_resize

import diffrate
from conftest import random_vit
from diffrate.errors import DiffRateError
from diffrate.methods.resolution import LowerResolution, in_turns, resized, smaller_sizes


def test_logits_of_a_model_that_timm_builds_for_that_size() -> None:
    model = random_vit()
    smaller = random_vit(img_size=20)
    smaller.load_state_dict(checkpoint_filter_fn(model.state_dict(), smaller))
    images = torch.randn(4, 3, 32, 32)
    low = torchvision_resize(images, [20, 20], InterpolationMode.BICUBIC, antialias=True)
    with torch.no_grad():
        before = model(images)
        baseline = LowerResolution(resized(model, (20, 20)), model, 0.5)
        logits = baseline(images)
        torch.testing.assert_close(logits[[0, 2]], smaller(low)[[0, 2]], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits[[1, 3]], before[[1, 3]])
        assert torch.equal(model(images), before)  # the model itself is as it was
    assert baseline.gmacs == pytest.approx((diffrate.gmacs(model) + diffrate.gmacs(smaller)) / 2)


def test_weights_are_shared_and_sizes_shrink_in_shape() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=(128, 64), depth=1)
    assert smaller_sizes(model)[:3] == [(112, 64), (96, 48), (80, 32)]
    other = resized(model, (96, 48))
    assert other.blocks[0].mlp.fc1.weight is model.blocks[0].mlp.fc1.weight
    assert model.patch_embed.img_size == (128, 64)
    assert other.patch_embed.img_size == (96, 48)


@pytest.mark.parametrize("gmacs", [0.655, 0.81, 1.0])
def test_meets_a_budget_between_two_sizes(gmacs: float) -> None:
    model = timm.create_model("vit_tiny_patch16_224")
    found = LowerResolution.at(model, gmacs)
    (low, _), (high, _) = found.sizes
    assert high - low == 16
    costs = [diffrate.gmacs(timm.create_model("vit_tiny_patch16_224", img_size=s)) for s in (low, high)]
    assert costs[0] <= gmacs <= costs[1]
    assert (1 - found.share) * costs[0] + found.share * costs[1] == pytest.approx(gmacs)


def test_turns_are_even() -> None:
    for share in (0.0, 0.3, 0.5, 1.0):
        turns = in_turns(100, share)
        assert int(turns.sum()) == round(100 * share)
        assert all(abs(int(turns[:n].sum()) - n * share) <= 1 for n in range(101))


def test_what_cannot_be_met_is_refused() -> None:
    model = random_vit()
    with pytest.raises(DiffRateError, match="less than a budget"):
        LowerResolution.at(model, 2 * diffrate.gmacs(model))
    with pytest.raises(DiffRateError, match="cannot meet"):
        LowerResolution.at(model, 1e-9)


@pytest.mark.parametrize(("share", "batch"), [(0.5, 1), (0.99, 1), (0.37, 64), (0.3, 7)])
def test_what_is_charged_is_what_runs_in_batches_of_any_size(share: float, batch: int) -> None:
    model = random_vit(depth=1)
    baseline = LowerResolution(resized(model, (20, 20)), model, share)
    ran = {"smaller": 0, "larger": 0}

    def count(name: str):
        def hook(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            ran[name] += len(arguments[0])

        return hook

    for name in ran:
        getattr(baseline, name).register_forward_pre_hook(count(name))
    images = torch.randn(128, 3, 32, 32)
    with torch.no_grad():
        logits = torch.cat([baseline(part) for part in images.split(batch)])
        assert ran["larger"] == pytest.approx(128 * share, abs=1)
        assert sum(ran.values()) == 128
        cost = ran["larger"] * diffrate.gmacs(model) + ran["smaller"] * diffrate.gmacs(baseline.smaller)
        assert cost / 128 == pytest.approx(baseline.gmacs, rel=0.01)
        baseline.eval()  # the same images get the same sizes again, however they come
        torch.testing.assert_close(baseline(images), logits, rtol=1e-4, atol=1e-4)
