"""Each name of `diffrate methods` runs the rule that it says, and is read back from its settings as it was."""

from __future__ import annotations

import itertools

import pytest
import torch

import diffrate
from conftest import random_vit
from diffrate.backbones import backbone_of
from diffrate.errors import DiffRateError
from diffrate.methods import METHODS, build, settings_of, to_train
from diffrate.methods.ats import AdaptiveSampling
from diffrate.methods.dynamicvit import DynamicViT
from diffrate.methods.evit import EViT
from diffrate.methods.evovit import EvoViT
from diffrate.methods.policy import MethodModel, PolicyModel
from diffrate.methods.resolution import LowerResolution
from diffrate.methods.spvit import SPViT
from diffrate.methods.tome import NormPreserving, SizeAware, ToMe

POLICIES = {
    "evit": EViT,
    "tome": ToMe,
    "tome-decreasing": ToMe,
    "atm": SizeAware,
    "tofu": NormPreserving,
    "ats": AdaptiveSampling,
}
MODELS = {"evo-vit": EvoViT, "dynamicvit": DynamicViT, "spvit": SPViT}
SCHEDULES = ("published", "search", "constant-rate", "random")
IMAGES = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def made(name: str) -> MethodModel:
    torch.manual_seed(0)
    model = random_vit(depth=8)
    if name == "dynamicvit":
        return DynamicViT(model, 0.6)
    if name == "spvit":
        return SPViT(model, 0.6)
    found = build(name, model, 0.6 * diffrate.gmacs(model), IMAGES)
    assert isinstance(found, MethodModel)
    return found


def answers(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IMAGES)


def test_every_method_is_looked_at() -> None:
    assert {*POLICIES, *MODELS, *SCHEDULES, "resolution"} == set(METHODS)
    assert {name for name, method in METHODS.items() if method.rebuild} == {*POLICIES, *MODELS}


@pytest.mark.parametrize("name", [*POLICIES, *MODELS])
def test_a_name_runs_its_rule_and_is_read_back(name: str) -> None:
    model, rebuild = made(name), METHODS[name].rebuild
    assert rebuild is not None
    again = rebuild(model.original, settings_of(model))
    for each in (model, again):
        if name in POLICIES:
            assert isinstance(each, PolicyModel)
            assert type(each.policy) is POLICIES[name]
        else:
            assert type(each) is MODELS[name]
    again.load_state_dict(model.state_dict())  # selectors
    assert torch.equal(answers(again), answers(model))
    assert settings_of(again) == settings_of(model)


def test_evit_is_read_back_without_its_fused_token() -> None:
    model = random_vit(depth=8)
    fused, dropped = (
        PolicyModel(model, EViT(backbone_of(model).layout, 0.5, fuse)) for fuse in (True, False)
    )
    rebuild = METHODS["evit"].rebuild
    assert rebuild is not None
    assert torch.equal(answers(rebuild(model, settings_of(dropped))), answers(dropped))
    assert not torch.allclose(answers(fused), answers(dropped))


def test_what_is_merged_falls_where_the_name_says_so() -> None:
    constant, falling = (settings_of(made(name))["r"] for name in ("tome", "tome-decreasing"))
    assert max(constant) - min(constant) <= 1
    assert falling[0] > 2 * falling[-1]
    assert all(a >= b for a, b in itertools.pairwise(falling))


def test_lower_resolution_is_that() -> None:
    model = random_vit(depth=8)
    found = build("resolution", model, 0.6 * diffrate.gmacs(model))
    assert isinstance(found, LowerResolution)


@pytest.mark.parametrize("name", [name for name in METHODS if not METHODS[name].trained])
def test_a_budget_above_the_whole_model_asks_for_nothing(name: str) -> None:
    model = random_vit(depth=8)
    with pytest.raises(DiffRateError, match="asks for nothing"):
        build(name, model, 1.001 * diffrate.gmacs(model), IMAGES)


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].rebuild])
def test_to_train_too_selectors_or_not(name: str) -> None:
    model = random_vit(depth=8)
    with pytest.raises(DiffRateError, match="asks for nothing"):
        to_train(name, model, 1.001 * diffrate.gmacs(model), IMAGES)
