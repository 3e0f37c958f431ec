"""Tiny models with the logits, sizes and sources that the published implementation gives for them."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open

import diffrate

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"
SHAPE = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4, "num_classes": 10}
MODELS = {"deit_mini": {}, "mae_mini": {"global_pool": "avg"}}


@pytest.fixture(scope="module", params=MODELS)
def golden(request):
    path = GOLDEN / f"{request.param}.safetensors"
    if not path.exists():
        pytest.skip(f"{path.name} is not next to this checkout, in ../shared/golden")
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # not a dict
        schedules = {key: json.loads(text) for key, text in file.metadata().items()}
    model = timm.create_model("vit_tiny_patch16_224", **SHAPE, **MODELS[request.param]).eval()
    weights = {key.removeprefix("weights."): t for key, t in tensors.items() if key.startswith("weights.")}
    model.load_state_dict(weights)
    return model, tensors, schedules


def runs(golden):
    model, tensors, schedules = golden
    for key, values in schedules.items():
        fast = diffrate.compress(model, diffrate.Schedule(values["prune"], values["merge"]))
        with torch.no_grad():
            logits, tokens = fast(tensors["images"], return_tokens=True)
        yield key.removeprefix("schedule."), fast, logits, tokens, values


def source_of(tokens):
    """(B, kept, input tokens) 0/1: which input tokens each kept token stands for, prefix tokens for themselves."""
    count, prefix = tokens.count, tokens.prefix
    images, patches = tokens.patches.shape
    source = torch.zeros(images, count, prefix + patches, dtype=torch.uint8)
    for p in range(prefix):
        source[:, p, p] = 1
    for image, token_of in enumerate(tokens.patches.tolist()):
        for patch, token in enumerate(token_of):
            if token >= 0:
                source[image, token, prefix + patch] = 1
    return source


def by_source(source, size):
    """Per image, the set of (input tokens a token stands for) with its size: comparable in any token order."""
    return [
        {tuple(row.nonzero().flatten().tolist()): n.item() for row, n in zip(rows, sizes, strict=True)}
        for rows, sizes in zip(source, size, strict=True)
    ]


def test_uncompressed_logits(golden):
    model, tensors, _ = golden
    with torch.no_grad():
        logits = diffrate.compress(model)(tensors["images"])
    torch.testing.assert_close(logits, tensors["logits.uncompressed"], rtol=0, atol=1e-4)


def test_logits(golden):
    _, tensors, schedules = golden
    seen = []
    for i, _, logits, _, _ in runs(golden):
        torch.testing.assert_close(logits, tensors[f"logits.{i}"], rtol=0, atol=1e-4)
        seen.append(i)
    assert len(seen) == len(schedules) >= 2


def test_sizes(golden):
    _, tensors, _ = golden
    for i, _, _, tokens, _ in runs(golden):
        ours, theirs = (size.sort(dim=1).values for size in (tokens.sizes(), tensors[f"size.{i}"]))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_sources_and_the_size_of_each(golden):
    model, tensors, schedules = golden
    compared = 0
    for i, _, _, tokens, _ in runs(golden):
        if f"source.{i}" not in tensors:
            continue
        ours = by_source(source_of(tokens), tokens.sizes())
        theirs = by_source(tensors[f"source.{i}"], tensors[f"size.{i}"])
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.keys() == other.keys()
            assert mine == pytest.approx(other, abs=1e-4)
        compared += 1
    assert compared == (len(schedules) if model.global_pool == "token" else 0)


def test_gmacs(golden):
    """The recorded figure also embeds the class token, as if it were a 65th patch."""
    a_patch = 4 * 4 * 3 * 64 / 1e9
    for _, fast, _, _, values in runs(golden):
        assert diffrate.gmacs(fast) + a_patch == pytest.approx(values["gmacs"], rel=1e-6)
