"""Compressed models as folders: what comes back, and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision import models as torchvision_models

import diffrate
from conftest import random_vit
from diffrate import embedded, methods
from diffrate.data import preprocessing
from diffrate.libraries import create
from diffrate.recipes import recipe_of

PRUNE, MERGE = (65, 60, 40, 9), (65, 50, 40, 5)
SCHEDULE = diffrate.Schedule(PRUNE, MERGE, operator=diffrate.Operator(mean="size"), made={"by": "hand"})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    diffrate.save(diffrate.compress(random_vit(), SCHEDULE), tmp_path / "saved")
    return tmp_path / "saved"


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def images(model: nn.Module, count: int = 4) -> torch.Tensor:
    layout = diffrate.compress(model).backbone.layout
    return torch.randn(count, layout.in_chans, *layout.img_size, generator=torch.Generator().manual_seed(1))


def test_what_comes_back_is_what_was_saved(saved: Path) -> None:
    whole = random_vit()
    fast = diffrate.compress(whole, SCHEDULE, choice="cost", operation="merge")
    diffrate.save(fast, saved)  # over the older one
    again = diffrate.load(saved)
    x = images(whole)
    with torch.no_grad():
        assert torch.equal(again(x), fast(x))
        assert not torch.equal(again(x), diffrate.compress(whole, SCHEDULE)(x))
    assert again.operator == fast.operator
    assert (again.schedule.prune, again.schedule.merge, again.schedule.made) == (PRUNE, MERGE, {"by": "hand"})
    assert not again.training
    assert preprocessing(again.original) == preprocessing(whole)
    assert {path.name for path in saved.iterdir()} == {"config.json", "model.safetensors"}


def test_the_files_can_be_read_without_diffrate(saved: Path) -> None:
    whole = random_vit()
    weights = load_file(saved / "model.safetensors")
    assert weights.keys() == whole.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in whole.state_dict().items())
    config = json.loads((saved / "config.json").read_text())
    assert config["weights_sha256"] == hashlib.sha256((saved / "model.safetensors").read_bytes()).hexdigest()
    assert (config["model"], config["num_classes"], config["img_size"]) == (
        "vit_tiny_patch16_224",
        7,
        [32, 32],
    )
    built = timm.create_model(
        config["model"], num_classes=7, img_size=config["img_size"], **config["model_kwargs"]
    ).eval()
    built.load_state_dict(weights)
    x = images(whole)
    assert torch.equal(built(x), whole(x))


def test_preprocessing_of_ones_own(tmp_path: Path) -> None:
    given = {"mean": (0.1, 0.2, 0.3), "crop_pct": 1.0}
    diffrate.save(diffrate.compress(random_vit(), SCHEDULE), tmp_path / "saved", data_config=given)
    config = preprocessing(diffrate.load(tmp_path / "saved").original)
    assert (config["mean"], config["crop_pct"]) == ((0.1, 0.2, 0.3), 1.0)
    assert config["std"] == (0.5, 0.5, 0.5)


def small(name: str) -> nn.Module:
    torch.manual_seed(0)
    width = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 3}
    tower = {**width, "image_size": 32, "patch_size": 8}
    match name:
        case "embedded":
            return embedded.model()
        case "eva":
            return timm.create_model(
                "eva02_tiny_patch14_336", img_size=56, depth=3, embed_dim=48, num_heads=2
            )
        case "half":
            return random_vit().to(torch.bfloat16)
        case "vit":
            pytest.importorskip("transformers", reason="needs diffrate[hf]")
            labels = {"id2label": {0: "cat", 1: "dog", 2: "eel"}, "label2id": {"cat": 0, "dog": 1, "eel": 2}}
            return create("transformers", "ViTForImageClassification", False, None, None, {**tower, **labels})
        case _:
            pytest.importorskip("transformers", reason="needs diffrate[hf]")
            config = {"vision_config": tower, "text_config": {**width, "vocab_size": 8}, "num_labels": 3}
            return create("transformers", "SiglipForImageClassification", False, None, None, config)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of transformers, about a tokenizer that is not used
@pytest.mark.parametrize("name", ["embedded", "eva", "half", "vit", "siglip"])
def test_every_library(name: str, tmp_path: Path) -> None:
    model = small(name).eval()
    layout = diffrate.compress(model).backbone.layout
    kept = [layout.tokens, *[layout.tokens - 4] * (layout.depth - 1)]
    fast = diffrate.compress(model, diffrate.Schedule(kept, kept, layout.prefix))
    diffrate.save(fast, tmp_path)
    again = diffrate.load(tmp_path)
    x = images(model, 2).to(next(model.parameters()).dtype)
    with torch.no_grad():
        ours, theirs = fast(x), again(x)
        if name in ("vit", "siglip"):
            ours, theirs = ours.logits, theirs.logits
        assert torch.equal(ours, theirs)
    if name == "vit":
        assert again.config.id2label == {0: "cat", 1: "dog", 2: "eel"}


def test_torchvision_by_its_shape() -> None:
    with torch.device("meta"):
        recipe = recipe_of(torchvision_models.vit_b_32(image_size=64, num_classes=5))
    assert (recipe.model, recipe.num_classes, recipe.img_size) == ("torchvision:vit_b_32", 5, (64, 64))


@pytest.mark.parametrize("kwargs", [{"mlp_ratio": 2}, {"act_layer": "relu"}])
def test_a_model_that_does_not_tell_how_it_was_built(kwargs: dict[str, object], tmp_path: Path) -> None:
    """A narrower MLP shows in the weights; another activation only in the numbers."""
    fast = diffrate.compress(random_vit(**kwargs), SCHEDULE)
    with pytest.raises(diffrate.DiffRateError, match=r"when it is built again|cannot be built again"):
        diffrate.save(fast, tmp_path / "new" / "saved")
    assert not list(tmp_path.iterdir())
    shape = {"patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 2}
    diffrate.save(fast, tmp_path / "saved", model_kwargs={**shape, **kwargs})
    x = images(fast.original)
    with torch.no_grad():
        assert torch.equal(diffrate.load(tmp_path / "saved")(x), fast(x))


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(
        diffrate.DiffRateError, match=r"what diffrate\.compress returns, not a VisionTransformer"
    ):
        diffrate.save(random_vit(), tmp_path / "saved")
    rival = methods.build("tome", random_vit(), 0.002)
    with pytest.raises(diffrate.DiffRateError, match="a rule of its own"):
        diffrate.save(rival, tmp_path / "saved")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(diffrate.DiffRateError, match="cannot write"):
        diffrate.save(diffrate.compress(random_vit(), SCHEDULE), tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_missing_and_damaged_files(saved: Path) -> None:
    weights, config = saved / "model.safetensors", saved / "config.json"
    whole = weights.read_bytes()
    for damaged in (whole[:-8], whole[:-1] + bytes([whole[-1] ^ 1])):
        weights.write_bytes(damaged)
        with pytest.raises(diffrate.DiffRateError, match=r"model\.safetensors is damaged"):
            diffrate.load(saved)
    weights.unlink()
    with pytest.raises(diffrate.DiffRateError, match=r"there is no .*model\.safetensors"):
        diffrate.load(saved)
    for text, sentence in (
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "is no model of diffrate.save"),
        ('{"format": "diffrate.model", "version": 2}', "version 2, and only 1"),
        ('{"format": "diffrate.model", "version": 1}', "it names no model"),
    ):
        config.write_text(text)
        with pytest.raises(diffrate.DiffRateError, match=sentence):
            diffrate.load(saved)
    config.unlink()
    with pytest.raises(diffrate.DiffRateError, match=r"cannot read .*config\.json"):
        diffrate.load(saved)


def test_files_that_do_not_belong_together(saved: Path) -> None:
    other = random_vit(embed_dim=64)
    save_file(other.state_dict(), saved / "model.safetensors")
    digest = hashlib.sha256((saved / "model.safetensors").read_bytes()).hexdigest()
    edit(saved, weights_sha256=digest)
    with pytest.raises(diffrate.DiffRateError, match="does not fit vit_tiny_patch16_224"):
        diffrate.load(saved)


SHAPE = {"patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 2}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_kwargs": {**SHAPE, "checkpoint_path": "evil.pth"}}, "'checkpoint_path' is no argument"),
        ({"model_kwargs": {**SHAPE, "pretrained": True}}, "'pretrained' is no argument"),
        (
            {"model_kwargs": {**SHAPE, "pretrained_cfg": {"url": "http://x"}}},
            "'pretrained_cfg' is no argument",
        ),
        ({"model_kwargs": {**SHAPE, "act_layer": {"a": 1}}}, "'act_layer' must be text"),
        ({"model_kwargs": {**SHAPE, "embed_dim": 10**9}}, "'embed_dim' is 1000000000"),
        ({"model_kwargs": {**SHAPE, "depth": 60_000}}, "more blocks than"),
        ({"model": "hf-hub:somebody/model"}, "timm knows no model"),
        ({"model": "local-dir:/tmp"}, "timm knows no model"),
        ({"model": "transformers:pipeline"}, "transformers knows no model"),
        ({"model": "transformers:somebody/model"}, "transformers knows no model"),
        ({"model": "torchvision:resnet50"}, "torchvision knows no model"),
        (
            {
                "model": "transformers:ViTForImageClassification",
                "model_kwargs": {"attn_implementation": "somebody/kernel"},
            },
            "ViTConfig has no field 'attn_implementation' that a file may set",
        ),
        (
            {
                "model": "transformers:SiglipForImageClassification",
                "model_kwargs": {"vision_config": {"_attn_implementation": "somebody/kernel"}},
            },
            "SiglipVisionConfig has no field '_attn_implementation'",
        ),
        ({"num_classes": -1}, "num_classes is -1"),
        ({"img_size": [32]}, "img_size must be"),
        ({"schedule": {"format": "diffrate.schedule"}}, "schedule version"),
        ({"data_config": {"mean": "half"}}, "mean in data_config is 'half'"),
        ({"data_config": {"loader": "x"}}, "data_config must be an object of"),
    ],
)
def test_nothing_in_a_file_is_run_downloaded_or_believed(
    changes: dict[str, object], sentence: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a model was built from a file that is not trustworthy")

    if str(changes.get("model", "")).startswith("transformers:"):
        pytest.importorskip("transformers", reason="needs diffrate[hf]")
    monkeypatch.setattr("diffrate.recipes.load_model", never)
    edit(saved, **changes)
    with pytest.raises(diffrate.DiffRateError, match=sentence):
        diffrate.load(saved)
