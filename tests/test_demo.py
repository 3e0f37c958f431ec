"""The demonstration, on a small model with a search of two steps."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from torch import nn

import diffrate
from conftest import Ran, check_refused
from diffrate import embedded
from diffrate.cli import demo as command
from diffrate.demo import demo
from diffrate.errors import DiffRateError
from diffrate.report import read_run

QUICK = {"steps": 2, "batch_size": 4, "checks": 1, "held_out": 0.02}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """50 tokens and 4 blocks, in place of the embedded model."""
    torch.manual_seed(0)
    shape = {"img_size": 28, "patch_size": 4, "in_chans": 1, "embed_dim": 32, "num_heads": 1, "depth": 4}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **shape)
    monkeypatch.setattr(embedded, "model", lambda: model)
    return model


def test_compares_at_the_same_macs_and_saves_everything(small: nn.Module, tmp_path: Path) -> None:
    said: list[str] = []
    contenders = demo(tmp_path / "out", images=60, settings=QUICK, say=said.append)
    assert [c.name for c in contenders] == [
        "uncompressed", "diffrate search", "ToMe", "EViT",
    ]  # fmt: skip
    whole, *others = contenders
    assert whole.gmacs == diffrate.gmacs(small)
    assert (whole.speedup, whole.comparison.changed) == (1.0, 0)
    for other in others:
        assert 0.47 * whole.gmacs < other.gmacs <= 0.5 * whole.gmacs
        assert other.evaluation.images == other.comparison.images == 60
        assert other.speedup == other.evaluation.images_per_second / whole.evaluation.images_per_second
    found = diffrate.Schedule.load(tmp_path / "out" / "schedule.json")
    assert others[0].settings["schedule"] == found.to_dict()
    assert any(" ".join(map(str, found.merge)) in line for line in said)
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    assert saved["results"]["images"] == 60
    assert [m["top1"] for m in saved["results"]["models"]] == [c.evaluation.top1 for c in contenders]
    with Image.open(tmp_path / "out" / "tokens.png") as picture:
        assert picture.mode == "RGB"
        assert picture.width > 3 * 168
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert f"scores {others[0].evaluation.top1:.1f}" in page
    assert all(name in page for name in ("ToMe", "EViT", "T-shirt/top", 'id="explorer"'))
    shown = read_run(tmp_path / "out").measured["results"]
    assert [row["top1"] for row in shown["models"]] == [c.evaluation.top1 for c in contenders]
    assert len(shown["pictures"]) == 12
    demo(tmp_path / "out", images=60, settings=QUICK)  # a second run replaces the first


def test_somebody_elses_search_is_left_alone(small: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model": "mine"}')
    with pytest.raises(DiffRateError, match="a search that is not the demo's"):
        demo(tmp_path, settings=QUICK)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_command_prints_one_table(
    diffrate_cli: Callable[..., Ran], small: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_demo", functools.partial(command.run_demo, settings=QUICK))
    ran = diffrate_cli("demo", "--output", tmp_path / "out", "--images", 20, "--seed", 1)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    (heading,) = [i for i, line in enumerate(lines) if "speed-up" in line]
    rows = lines[heading + 1 : heading + 5]
    assert [row.split("  ")[0] for row in rows] == [
        "uncompressed", "diffrate search", "ToMe", "EViT",
    ]  # fmt: skip
    assert rows[0].endswith("1.00x")
    assert all("±" in row for row in rows[1:])
    assert f"Saved to {tmp_path / 'out'}" in lines[-1]
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    assert saved["command"].startswith("diffrate demo --output")
    assert saved["results"]["search"]["seed"] == 1


def test_help_teaches(diffrate_cli: Callable[..., Ran]) -> None:
    ran = diffrate_cli("demo", "--help")
    assert ran.code == 0
    assert "Example: diffrate demo" in ran.out
    assert all(option in ran.out for option in ("--output", "--images", "--seed"))


def test_mistakes_are_refused_before_the_search(
    diffrate_cli: Callable[..., Ran], small: nn.Module, tmp_path: Path
) -> None:
    check_refused(diffrate_cli("demo", "--images", 2001), "between 2 and 2000, not 2001")
    (tmp_path / "file").touch()
    check_refused(diffrate_cli("demo", "--output", tmp_path / "file"), "cannot write")
    with pytest.raises(DiffRateError, match="not 1"):
        demo(tmp_path, images=1)
