"""Models of other libraries by name, and the sentence that names the extra to install."""

import importlib

import pytest
import torch

import diffrate
from diffrate import libraries
from diffrate.errors import DiffRateError
from diffrate.models import input_size, load_model

HF = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "patch_size": 8,
}


def test_names():
    assert libraries.split_name("transformers:ViTModel") == ("transformers", "ViTModel")
    assert libraries.split_name("hf_hub:timm/vit") == ("timm", "hf_hub:timm/vit")
    assert libraries.split_name("deit_tiny_patch16_224") == ("timm", "deit_tiny_patch16_224")


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("transformers:ViTModel", "transformers", "hf"), ("openclip:ViT-B-32", "open_clip", "openclip")],
)
def test_a_missing_library_names_the_extra(monkeypatch, name, package, extra):
    def missing(wanted, *arguments):
        assert wanted == package
        raise ImportError(wanted)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        DiffRateError, match=rf"{package} is not installed: pip install 'diffrate\[{extra}\]'"
    ):
        load_model(name)


def test_transformers(tmp_path):
    pytest.importorskip("transformers", reason="needs diffrate[hf]")
    made = load_model("transformers:ViTForImageClassification", num_classes=4, img_size=48, model_kwargs=HF)
    assert input_size(made) == (48, 48)
    assert made.config.num_labels == 4
    made.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_processor_type": "ViTImageProcessor", "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.2, 0.2]}'
    )
    again = load_model(f"transformers:{tmp_path}", pretrained=True)
    assert again.pretrained_cfg["mean"] == (0.4, 0.5, 0.6)
    images = torch.randn(1, 3, 48, 48)
    with torch.no_grad():
        torch.testing.assert_close(again(images).logits, made(images).logits)
    for wrong, sentence in (("nowhere/at all", "could not build"), ("ViTModel", "without weights")):
        with pytest.raises(DiffRateError, match=sentence):
            load_model(f"transformers:{wrong}", pretrained=True)
    with pytest.raises(DiffRateError, match="square"):
        load_model("transformers:ViTModel", img_size=(32, 48))


def test_torchvision():
    made = load_model("torchvision:vit_b_32", num_classes=3, img_size=64)
    assert input_size(made) == (64, 64)
    assert diffrate.compress(made).num_classes == 3
    with pytest.raises(DiffRateError, match="torchvision knows no model"):
        load_model("torchvision:vit_tiny")


def test_openclip():
    pytest.importorskip("open_clip", reason="needs diffrate[openclip]")
    with pytest.raises(DiffRateError, match="OpenCLIP knows no model"):
        load_model("openclip:ViT-Z")
    with pytest.raises(DiffRateError, match="say which weights"):
        load_model("openclip:ViT-B-32", pretrained=True)
    with pytest.raises(DiffRateError, match="no classes"):
        load_model("openclip:ViT-B-32", num_classes=10)
    tower = load_model("openclip:ViT-B-32")
    assert input_size(tower) == (224, 224)
    assert diffrate.gmacs(tower) == pytest.approx(4.41, abs=0.01)
