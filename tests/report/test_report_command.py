"""`diffrate report` from a search to a page, and its mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from conftest import TINY_FLAGS, Ran, check_refused, write_image
from diffrate.cli import report as command
from diffrate.data import build_dataset
from diffrate.report.classes import class_names
from report.runs import plain_run


@pytest.fixture
def searched(diffrate_cli: Callable[..., Ran], checkpoint: Path, tmp_path: Path) -> Path:
    """A real search of two steps."""
    for i in range(16):
        write_image(tmp_path / "search" / f"{i:02d}.png", i)
    flags = ["--budget", "70%", "--steps", 2, "--batch-size", 4, "--workers", 0, "--device", "cpu"]
    ran = diffrate_cli(
        "search", *TINY_FLAGS, "--checkpoint", checkpoint, "--data-dir", tmp_path / "search", *flags,
        "--output", tmp_path / "run",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    return tmp_path / "run"


def test_from_a_search_to_a_page(
    diffrate_cli: Callable[..., Ran], searched: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = diffrate_cli("report", searched)
    assert first.code == 0, first.err
    assert first.out.strip() == str(searched / "report.html")
    text = (searched / "report.html").read_text(encoding="utf-8")
    assert "nothing was measured yet" in text
    assert "diffrate search --model vit_tiny_patch16_224" in text
    assert not (searched / "measured.json").exists()

    data = ["--data-dir", image_folder, "--split", "val", "--workers", 0, "--device", "cpu"]

    def ask(*more: object) -> None:
        done = diffrate_cli("report", searched, *data, "--explore", 4, "--methods", "tome", *more)
        assert done.code == 0, done.err

    ask("--images", 9, "--json", searched / "out.json")
    assert json.loads((searched / "out.json").read_text())["results"]["measured"] is True
    measured = json.loads((searched / "measured.json").read_text())
    results = measured["results"]
    assert [row["name"] for row in results["models"]] == ["uncompressed", "diffrate search", "tome"]
    assert results["models"][0]["images"] == 9
    assert [c["images"] for c in results["classes"]] == [3, 3, 3]  # evenly spread
    assert [c["name"] for c in results["classes"]] == ["000", "001", "002"]
    assert {p["name"] for p in results["pictures"]} <= {f"{i:02d}.png" for i in range(12)}
    assert results["asked"]["preprocessing"]["crop_pct"] == 0.9  # as in the search
    assert "times as fast" in (searched / "report.html").read_text(encoding="utf-8")

    # The uncompressed model is the one that was searched on, weights and all.
    ran = diffrate_cli(
        "eval", *TINY_FLAGS, "--checkpoint", results["asked"]["checkpoint"], *data, "--json", searched / "eval.json"
    )  # fmt: skip
    assert ran.code == 0, ran.err
    ask()
    evaluated = json.loads((searched / "eval.json").read_text())["results"]["uncompressed"]
    results = json.loads((searched / "measured.json").read_text())["results"]
    assert results["models"][0]["loss"] == pytest.approx(evaluated["loss"], rel=1e-5)

    # What is measured is not measured again, unless asked for, nor needed for a page.
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("measured again"))
    ask()
    assert diffrate_cli("report", searched, "--output", searched / "other.html").code == 0
    assert "times as fast" in (searched / "other.html").read_text(encoding="utf-8")
    with pytest.raises(pytest.fail.Exception):
        ask("--fresh")


def test_mistakes(diffrate_cli: Callable[..., Ran], tmp_path: Path, image_folder: Path) -> None:
    run = plain_run(tmp_path / "run", model=None)
    data = ["--data-dir", image_folder]
    refused = [
        ([tmp_path / "none"], "none is not a folder"),
        ([image_folder], "holds no finished search"),
        ([run, "--model", "vit_tiny_patch16_224"], "--model matters only with images: give --data-dir"),
        ([run, *data], "give --model: the run folder does not say"),
        ([run, *data, "--model", "vit_tiny_patch16_224", "--device", "cpu"], "the schedule has 4 blocks"),
        (
            [run, "--data-dir", tmp_path / "no", "--model", "vit_tiny_patch16_224"],
            "data folder .* does not exist",
        ),
        ([run, "--output", tmp_path], "cannot write"),
    ]
    for arguments, sentence in refused:
        check_refused(diffrate_cli("report", *arguments), sentence)
    assert {path.name for path in run.iterdir()} == {"schedule.json", "history.json", "config.json"}


def test_class_names(tmp_path: Path) -> None:
    for i, name in enumerate(("cat", "dog")):
        write_image(tmp_path / "named" / name / f"{i}.png", i)
        write_image(tmp_path / "numbers" / f"{207 + i:04d}" / f"{i}.png", i)
    named = build_dataset(tmp_path / "named")
    assert class_names(named, 3) == ["cat", "dog", "class 2"]
    assert class_names(named, 1000)[:3] == ["cat", "dog", "class 2"]
    numbers = build_dataset(tmp_path / "numbers")
    assert class_names(numbers, 300)[207] == "0207"
    assert class_names(numbers, 1000)[207] == "golden retriever"
    assert class_names(None, 2) == ["class 0", "class 1"]


def test_a_spread_of_images_keeps_every_class(image_folder: Path, tiny_vit: nn.Module) -> None:
    images = build_dataset(image_folder / "val")
    images.spread(6)
    assert [images[i][1] for i in range(len(images))] == [0, 0, 1, 1, 2, 2]
    assert images.file_name(0) == "00.png"
    assert images.file_name(5) == "11.png"
    images.spread(100)
    assert len(images) == 6
    images.spread(3)
    assert [images.file_name(i) for i in range(3)] == ["00.png", "04.png", "11.png"]
