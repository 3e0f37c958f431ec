"""Models by name and checkpoint: what loads, and the sentence for what does not."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from conftest import TINY
from diffrate.errors import DiffRateError
from diffrate.models import input_size, load_model

NAME = "vit_tiny_patch16_224"
KWARGS = {k: v for k, v in TINY.items() if k not in ("num_classes", "img_size")}


def load_tiny(**changes: object) -> nn.Module:
    return load_model(NAME, **{"num_classes": 3, "img_size": 32, "model_kwargs": KWARGS, **changes})


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_half_precision_checkpoint_fills_a_float_model(
    tiny_vit: nn.Module, tmp_path: Path, suffix: str
) -> None:
    half = {k: v.half() for k, v in tiny_vit.state_dict().items()}
    path = tmp_path / f"weights.{suffix}"
    save_file(half, path) if suffix == "safetensors" else torch.save({"state_dict": half}, path)
    loaded = load_tiny(checkpoint=path)
    assert not loaded.training
    assert {v.dtype for v in loaded.state_dict().values()} == {torch.float32}
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, half[key].float()), key


def test_checkpoint_of_another_image_size_has_its_positions_resized(
    tiny_vit: nn.Module, tmp_path: Path
) -> None:
    save_file(tiny_vit.state_dict(), tmp_path / "weights.safetensors")
    loaded = load_tiny(checkpoint=tmp_path / "weights.safetensors", img_size=(48, 32))
    assert loaded.pos_embed.shape[1] == 1 + 6 * 4
    assert input_size(loaded) == (48, 32)
    assert torch.equal(loaded.head.weight, tiny_vit.head.weight)


def test_input_size_is_the_one_the_model_was_built_for(tiny_vit: nn.Module) -> None:
    assert input_size(tiny_vit) == (32, 32)
    assert input_size(load_model("resnet18")) == (224, 224)


def test_checkpoint_with_other_keys_is_refused_by_name(tiny_vit: nn.Module, tmp_path: Path) -> None:
    state = dict(tiny_vit.state_dict())
    state["elsewhere"] = state.pop("norm.weight")
    save_file(state, tmp_path / "weights.safetensors")
    with pytest.raises(DiffRateError, match=r"does not load into vit_tiny.*norm\.weight.*elsewhere") as error:
        load_tiny(checkpoint=tmp_path / "weights.safetensors")
    assert "\n" not in str(error.value)


def test_checkpoint_of_another_shape_is_refused(tiny_vit: nn.Module, tmp_path: Path) -> None:
    save_file(tiny_vit.state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(DiffRateError, match=r"size mismatch for head\.weight"):
        load_tiny(checkpoint=tmp_path / "weights.safetensors", num_classes=7)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth"])
def test_corrupt_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not weights at all" * 100)
    with pytest.raises(DiffRateError, match="does not load"):
        load_tiny(checkpoint=tmp_path / name)


def test_pickled_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"state_dict": Hostile()}, tmp_path / "weights.pth")
    with pytest.raises(DiffRateError, match="does not load"):
        load_tiny(checkpoint=tmp_path / "weights.pth")
    assert not (tmp_path / "ran").exists()


def test_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiffRateError, match=r"absent\.safetensors does not exist"):
        load_tiny(checkpoint=tmp_path / "absent.safetensors")


def test_unknown_name_lists_near_ones() -> None:
    with pytest.raises(
        DiffRateError, match=r"no model 'vit_tiny_patch16'; near to it are .*vit_tiny_patch16_224"
    ):
        load_model("vit_tiny_patch16")
    with pytest.raises(DiffRateError, match=r"no model 'qqq'$"):
        load_model("qqq")


def test_unknown_argument_and_unknown_tag_are_one_sentence() -> None:
    for name, kwargs in ((NAME, {"no_such_option": 1}), ("vit_tiny_patch16_224.no_such_tag", {})):
        with pytest.raises(DiffRateError, match="timm could not build") as error:
            load_model(name, pretrained=not kwargs, model_kwargs=kwargs)
        assert "\n" not in str(error.value)
        assert str(error.value).endswith("already come by --checkpoint") is not bool(kwargs)


def test_a_model_that_takes_any_size_is_told_which() -> None:
    assert input_size(load_model("caformer_s18", img_size=(96, 160))) == (96, 160)
    assert input_size(load_model("caformer_s18")) == (224, 224)


def test_a_numpy_file_that_is_refused_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    np.savez(path, other=np.ones(2))
    with pytest.raises(DiffRateError, match="does not load into") as error:
        load_tiny(checkpoint=path)
    assert str(path) not in [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
    assert error.value.__cause__ is not None  # while it is there, all that was under way is
