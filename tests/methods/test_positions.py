"""Methods on models whose attention looks at positions: these go with the tokens, through every rule."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

import diffrate
from backbones.slow import noisy
from diffrate.backbones import backbone_of
from diffrate.methods import build
from diffrate.methods.evit import EViT
from diffrate.methods.policy import PolicyModel
from diffrate.tokens import Tokens

SMALL = {"depth": 6, "embed_dim": 64, "num_heads": 4, "num_classes": 7}
MODELS = {  # rotary embeddings, with a table of all blocks and with one a block, and biases of pairs
    "eva02_tiny_patch14_224": {"img_size": 84},
    "vit_base_patch16_rope_mixed_224": {"img_size": 96},
    "beit_base_patch16_224": {"img_size": 96},
}
METHODS = ("evit", "tome", "tome-decreasing", "atm", "tofu", "ats")


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    kwargs = {**SMALL, **MODELS[request.param]}
    return noisy(timm.create_model(request.param, **kwargs)).eval()


@pytest.fixture
def images(model: nn.Module) -> Tensor:
    return torch.randn(3, 3, *backbone_of(model).layout.img_size)


@pytest.mark.parametrize("method", METHODS)
def test_a_token_sits_where_one_of_its_patches_was(method: str, model: nn.Module, images: Tensor) -> None:
    fast = build(method, model, 0.6 * diffrate.gmacs(model), images)
    with torch.no_grad():
        logits, tokens = fast(images, return_tokens=True)
    assert logits.isfinite().all()
    assert tokens.positions is not None
    check_places(tokens)
    torch.testing.assert_close(fast(images[1:2]), logits[1:2], rtol=1e-4, atol=1e-4)


def check_places(tokens: Tokens) -> None:
    """Prefix tokens are where they were; every other one that is not padding is where one of its patches was."""
    prefix = tokens.prefix
    places = tokens.positions.indices(*tokens.x.shape[:2])
    assert places.shape == tokens.x.shape[:2]
    alive = tokens.sizes() > 0
    moved = 0
    for image, patch_of in enumerate(tokens.patches.tolist()):
        assert places[image, :prefix].tolist() == list(range(prefix))
        for token in range(prefix, tokens.count):
            if alive[image, token]:
                members = [prefix + patch for patch, its in enumerate(patch_of) if its == token]
                assert places[image, token] in members
                moved += int(places[image, token]) != token
    assert moved


def test_pruning_by_evit_is_that_of_a_schedule(model: nn.Module, images: Tensor) -> None:
    layout = backbone_of(model).layout
    policy = EViT(layout, 0.6, fuse=False)
    schedule = diffrate.Schedule(policy.kept, policy.kept, layout.prefix)
    pruned = diffrate.compress(model, schedule, operation="prune", proportional=False)
    with torch.no_grad():
        torch.testing.assert_close(PolicyModel(model, policy)(images), pruned(images), rtol=1e-4, atol=1e-4)
        assert (pruned(images) - model(images)).abs().max() > 0.01
