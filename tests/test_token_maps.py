"""Token maps: every patch is where the model says, for models of every kind."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from torch import nn

import diffrate
from backbones.test_multihead import openclip_tower, torchvision_model
from backbones.test_timm_metaformer import build as small_caformer
from backbones.test_timm_relpos import build as small_beit
from conftest import TINY
from diffrate.backbones import backbone_of
from diffrate.libraries import create
from diffrate.pictures import strip
from diffrate.token_maps import FADED, PRUNED, as_seen, token_maps

SMALL = {"depth": 4, "embed_dim": 32, "num_heads": 2, "num_classes": 3}


def _transformers(img_size: tuple[int, int]) -> nn.Module:
    pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 48}
    return create("transformers", "ViTForImageClassification", False, 3, img_size, {**shape, "patch_size": 8})


MODELS = {
    "class token": lambda: timm.create_model("vit_tiny_patch16_224", **TINY),
    "mean pooled": lambda: timm.create_model(
        "vit_tiny_patch16_224", **TINY, class_token=False, global_pool="avg"
    ),
    "registers, not square": lambda: timm.create_model(
        "vit_small_patch14_reg4_dinov2", img_size=(28, 70), **SMALL
    ),
    "any size": lambda: timm.create_model("vit_tiny_patch16_224", **TINY, dynamic_img_size=True),
    "rotary": lambda: timm.create_model("eva02_tiny_patch14_224", img_size=56, **SMALL),
    "restored grid": small_caformer,
    "restored grid, odd size": small_caformer,
    "transformers": lambda: _transformers((32, 32)),
    "torchvision": torchvision_model,
    "openclip": openclip_tower,
    "relative positions": lambda: small_beit("beit_base_patch16_224"),
}
OTHER_SIZES = {"any size": (32, 64), "restored grid, odd size": (100, 130)}
GRIDS = {"any size": (4, 8), "restored grid, odd size": (7, 8), "registers, not square": (2, 5)}


@pytest.mark.parametrize("kind", MODELS)
def test_maps_say_what_the_model_did(kind: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    layout = backbone_of(model).layout
    n, p = layout.tokens, layout.prefix
    left = [n, n - 2, p + (n - p) // 2, p + 2]
    schedule = diffrate.Schedule((n, n - 1, left[2] + 1, left[3]), left, prefix=p)
    if layout.restores:
        schedule = diffrate.Schedule(left[:1] + left[:-1], left, prefix=p)
    size = OTHER_SIZES.get(kind, layout.img_size)
    inputs = torch.randn(2, 3, *size)
    fast = diffrate.compress(model, schedule)
    maps = token_maps(fast, inputs, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    trace = fast.trace(inputs)
    assert len(maps) == 2
    for b, image in enumerate(maps):
        assert image.pixels.shape == (*size, 3)
        assert image.depth == 4
        rows, columns = image.grid
        assert kind not in GRIDS or (rows, columns) == GRIDS[kind]
        assert strip(image).width > 0  # also where patches do not divide the pixels evenly
        for block, tokens in enumerate(trace):
            patches, numbers = tokens.patches[b].tolist(), image.tokens[block].flatten().tolist()
            assert len(numbers) == rows * columns == len(patches)
            assert image.count(block + 1) == len({t for t in patches if t >= 0}) <= tokens.count - p
            seen = [number for number in dict.fromkeys(numbers) if number != PRUNED]
            assert seen == list(range(len(seen)))
            for patch, number in zip(patches, numbers, strict=True):
                assert (patch < 0) == (number == PRUNED)
                if patch >= 0:  # one number for one token, with that token's size
                    assert image.mass[block][number] == pytest.approx(tokens.sizes()[b, patch].item())
        assert (image.tokens[0].flatten() == np.arange(rows * columns)).all()
    if not layout.restores and kind != "transformers":
        assert any((image.tokens[-1] == PRUNED).any() for image in maps)
    assert any(max(mass.max() for mass in image.mass) > 1 for image in maps)


def test_a_patch_once_pruned_stays_so_and_patches_of_one_token_stay_together(tiny_vit: nn.Module) -> None:
    fast = diffrate.compress(tiny_vit, diffrate.Schedule((17, 14, 10, 3), (17, 12, 8, 3)))
    (image,) = token_maps(fast, torch.randn(1, 3, 32, 32), (0.5,) * 3, (0.5,) * 3)
    for before, after in zip(image.tokens, image.tokens[1:], strict=False):
        assert (after[before == PRUNED] == PRUNED).all()
        for token in range(before.max() + 1):
            assert len(np.unique(after[before == token])) == 1
    assert tiny_vit.training is False


def test_images_as_the_model_saw_them() -> None:
    mean, std = (0.5, 0.4, 0.3), (0.25, 0.5, 0.2)
    colours = np.random.default_rng(0).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    inputs = (colours / 255 - np.array(mean)) / np.array(std)
    (seen,) = as_seen(torch.tensor(inputs).permute(2, 0, 1)[None], mean, std)
    assert (seen == colours).all()
    (grey,) = as_seen(torch.tensor([[[[0.0, 1.0, 2.0, -3.0]]]]), (0.0,), (1.0,))
    assert grey[0, :, 0].tolist() == [FADED, 255, 255, FADED]
    assert (grey == grey[..., :1]).all()
