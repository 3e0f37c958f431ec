"""LV-ViT-S: the published keys, the published size, and compression against its formula written out."""

import pytest
import timm
import torch
from safetensors.torch import save_file

import diffrate
from backbones.slow import Slow, check, check_search, noisy
from conftest import flop_counter
from diffrate.lvvit import LvViT
from diffrate.models import load_model

SIZE = {"img_size": 48, "num_classes": 5}
SMALL = {"patch_size": 8, "depth": 4, "embed_dim": 32, "num_heads": 2}
BLOCK = ["attn.proj.bias", "attn.proj.weight", "attn.qkv.weight"]
BLOCK += [
    f"{part}.{kind}" for part in ("mlp.fc1", "mlp.fc2", "norm1", "norm2") for kind in ("bias", "weight")
]
NORM = ["bias", "num_batches_tracked", "running_mean", "running_var", "weight"]


def build():
    model = noisy(load_model("lvvit_s", **SIZE, model_kwargs=SMALL))
    for name, buffer in model.named_buffers():
        if "running" in name:
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    return model


def test_keys_are_those_of_the_published_checkpoints():
    model = timm.create_model("lvvit_s")
    keys = {"cls_token", "pos_embed", "norm.weight", "norm.bias"}
    keys |= {f"{head}.{kind}" for head in ("head", "aux_head") for kind in ("weight", "bias")}
    keys |= {f"patch_embed.conv{i}.weight" for i in (1, 2, 3)}
    keys |= {f"patch_embed.bn{i}.{kind}" for i in (1, 2, 3) for kind in NORM}
    keys |= {"patch_embed.proj.weight", "patch_embed.proj.bias"}
    keys |= {f"blocks.{i}.{key}" for i in range(16) for key in BLOCK}
    state = model.state_dict()
    assert set(state) == keys
    assert state["patch_embed.proj.weight"].shape == (384, 64, 8, 8)
    assert state["blocks.0.attn.qkv.weight"].shape == (3 * 384, 384)
    assert state["blocks.15.mlp.fc1.weight"].shape == (3 * 384, 384)
    assert state["pos_embed"].shape == (1, 197, 384)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(26.2e6, rel=0.01)


def test_macs():
    model = timm.create_model("lvvit_s")
    with flop_counter() as counter:
        model.eval()(torch.zeros(1, 3, 224, 224))
    assert diffrate.gmacs(model) == pytest.approx(counter.get_total_flops() / 2e9, rel=1e-3)
    dense = 196 * 384 * 1000 / 1e9  # the paper's 6.6 has the head for token labels in it
    assert round(diffrate.gmacs(model) + dense, 1) == 6.6


def slow(model):
    """Blocks and stem from their weights; residual branches are halved."""
    stem = model.patch_embed

    def embed(image):
        x = image
        for conv, norm in ((stem.conv1, stem.bn1), (stem.conv2, stem.bn2), (stem.conv3, stem.bn3)):
            x = torch.relu(norm(conv(x)))
        x = stem.proj(x).flatten(2).transpose(1, 2)
        return torch.cat([model.cls_token, x], dim=1) + model.pos_embed

    def attend(i, x, places):
        block = model.blocks[i]
        return x + block.attn(block.norm1(x)) / 2

    def mlp(i, x):
        block = model.blocks[i]
        return x + block.mlp(block.norm2(x)) / 2

    def head(x, sizes, _):
        return model.head(model.norm(x)[:, 0])

    return Slow(embed, attend, mlp, head, 1, True)


def test_compressed():
    model = build()
    check(model, slow(model))
    check_search(model)


def test_checkpoint(tmp_path):
    model = build()
    assert isinstance(model, LvViT)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    again = load_model("lvvit_s", tmp_path / "weights.safetensors", **SIZE, model_kwargs=SMALL)
    images = torch.randn(1, 3, 48, 48)
    with torch.no_grad():
        assert torch.equal(again(images), model(images))
    with pytest.raises(diffrate.DiffRateError, match="checkpoint"):
        load_model("lvvit_s", pretrained=True)
