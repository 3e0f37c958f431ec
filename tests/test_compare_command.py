"""`diffrate compare` and `diffrate methods`: rows by their names, files in their places, and what is refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

import diffrate
from conftest import Ran, check_refused, write_image
from diffrate import embedded
from diffrate.methods import METHODS


def test_command(
    diffrate_cli: Callable[..., Ran],
    eval_flags: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = tmp_path / "mine.json"
    diffrate.Schedule((17, 12, 8, 5), (17, 12, 8, 5)).save(kept)
    flags = ["compare", *eval_flags[1:], "--schedule", kept, "--methods", "tome,random"]
    ran = diffrate_cli(*flags, "--output", tmp_path / "out", "--json", tmp_path / "again.json")
    assert ran.code == 0, ran.err
    assert [line.split()[1] for line in ran.out.splitlines()[2:5]] == ["mine", "tome", "random"]
    assert "12 images on cpu; speed: eager, float32, 5 images a batch" in ran.out
    assert ran.out.splitlines()[0].endswith("images/s  x whole")
    saved = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert [row["method"] for row in saved["rows"]] == ["mine", "tome", "random"]
    assert saved["rows"][0]["settings"]["schedule"]["merge"] == [17, 12, 8, 5]
    assert saved == json.loads((tmp_path / "again.json").read_text())["results"]
    title, rows, origin = (tmp_path / "out" / "table.md").read_text().removesuffix("\n").split("\n\n")
    assert title == "# vit_tiny_patch16_224, 12 images; speed: eager, float32, 5 images a batch"
    assert rows.count("\n") == 5
    assert origin.startswith("`diffrate compare ")
    assert ran.out.splitlines()[0].split("  ")[-4].strip() == "points to mine"
    assert (tmp_path / "out" / "table.csv").read_text().count("\n") == 5
    with Image.open(tmp_path / "out" / "plot.png") as picture:
        assert picture.width > 1000
    named = ["compare", *eval_flags[1:], "--methods", "tome", "--no-speed", "--json", tmp_path / "named.json"]
    other = tmp_path / "other" / "mine.json"  # of the same name, at another budget
    diffrate.Schedule((17, 10, 6, 3), (17, 10, 6, 3)).save(other)
    for texts, names in (([kept, other], ["mine"] * 2), ([f"a={kept}", f"b={other}"], ["a", "b"])):
        assert diffrate_cli(*named, *[each for text in texts for each in ("--schedule", text)]).code == 0
        saved = json.loads((tmp_path / "named.json").read_text())["results"]
        assert [row["method"] for row in saved["rows"][::2]] == names
        assert saved["schedules"] == list(map(str, texts))
    odd = tmp_path / "x=1" / "mine.json"  # a path is a path
    diffrate.Schedule((17, 10, 6, 3), (17, 10, 6, 3)).save(odd)
    monkeypatch.chdir(tmp_path)
    for text in ("x=1/mine.json", odd):
        assert diffrate_cli(*named, "--schedule", text).code == 0
        assert json.loads((tmp_path / "named.json").read_text())["results"]["rows"][0]["method"] == "mine"
    check_refused(diffrate_cli(*named, "--schedule", tmp_path / "y=1" / "no.json"), "y=1/no.json")
    check_refused(diffrate_cli(*named, "--speed", "--mode", "quick"), "a mode is one of eager, compiled")


@pytest.mark.parametrize("file", ["plot.png", "table.md", "table.csv"])
def test_what_cannot_be_written_is_refused_before_anything_runs(
    diffrate_cli: Callable[..., Ran], eval_flags: list[object], tmp_path: Path, file: str
) -> None:
    (tmp_path / file).mkdir()
    ran = diffrate_cli(
        "compare", *eval_flags[1:], "--methods", "tome", "--budget", "70%", "--output", tmp_path
    )
    check_refused(ran, f"cannot write .*{file}")
    assert not [
        path for path in tmp_path.iterdir() if path.is_file() and path.suffix in (".md", ".csv", ".png")
    ]


def test_the_embedded_model_is_compared_on_the_images_that_ship(
    diffrate_cli: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {split: tuple(part[:20] for part in embedded.images(split)) for split in embedded.SPLITS}
    monkeypatch.setattr(embedded, "images", few.__getitem__)
    quick = functools.partial(diffrate.search, steps=1, batch_size=4, checks=1, held_out=0.2)
    monkeypatch.setattr("diffrate.methods.search", quick)
    flags = ["--model", "embedded", "--device", "cpu", "--workers", 0, "--json", tmp_path / "out.json"]
    ran = diffrate_cli("compare", *flags, "--methods", "search,tome", "--budget", "50%", "--no-speed")
    assert ran.code == 0, ran.err
    saved = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [row["method"] for row in saved["rows"]] == ["search", "tome"]
    with torch.no_grad():
        right = (
            embedded.model().eval()(embedded.normalise(few["test"][0][:, None])).argmax(-1) == few["test"][1]
        )
    assert saved["uncompressed"]["top1"] == pytest.approx(100 * right.float().mean().item())
    assert diffrate_cli("eval", *flags).code == 0
    assert json.loads((tmp_path / "out.json").read_text())["results"]["uncompressed"]["images"] == 20
    assert "random weights" not in ran.err
    check_refused(diffrate_cli("eval", *flags, "--img-size", 32), "ten classes and images of 28 pixels")
    for kwargs in ("pretrained=False", "depth=6", "nonsense=1"):
        check_refused(diffrate_cli("eval", *flags, "--model-kwargs", kwargs), "could not build embedded")
    judged = ["--methods", "search", "--budget", "50%", "--split", "search"]
    check_refused(diffrate_cli("compare", *flags, *judged), "images apart from those it is judged by")


def test_command_searches(
    diffrate_cli: Callable[..., Ran],
    eval_flags: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = functools.partial(diffrate.search, steps=2, batch_size=4, checks=1, held_out=0.2)
    monkeypatch.setattr("diffrate.methods.search", quick)
    for i in range(20):
        write_image(tmp_path / "search" / f"{i:02d}.png", seed=i)
    flags = ["compare", *eval_flags[1:], "--methods", "search,evit", "--budget", "70%"]
    check_refused(diffrate_cli(*flags), "the method search needs --search-dir")
    ran = diffrate_cli(*flags, "--search-dir", tmp_path / "search", "--no-speed")
    assert ran.code == 0, ran.err
    assert "images/s" not in ran.out
    assert not ran.err
    assert [line.split()[1] for line in ran.out.splitlines()[2:4]] == ["search", "evit"]


def test_fewer_images_are_spread_over_the_classes(
    diffrate_cli: Callable[..., Ran], eval_flags: list[object], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    flags = [*eval_flags[1:], "--images", 6, "--json", out]
    assert diffrate_cli("eval", *flags).code == 0
    few = json.loads(out.read_text())["results"]["uncompressed"]
    assert few["images"] == 6
    ran = diffrate_cli("compare", *flags, "--methods", "tome", "--budget", "70%", "--no-speed")
    assert ran.code == 0, ran.err
    assert "6 images on cpu" in ran.out
    whole = json.loads(out.read_text())["results"]["uncompressed"]
    assert (whole["images"], whole["loss"]) == (6, pytest.approx(few["loss"]))
    assert diffrate_cli("eval", *eval_flags[1:], "--json", out).code == 0
    assert json.loads(out.read_text())["results"]["uncompressed"]["loss"] != pytest.approx(few["loss"])


def test_list_of_methods(diffrate_cli: Callable[..., Ran], tmp_path: Path) -> None:
    ran = diffrate_cli("methods", "--json", tmp_path / "methods.json")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert [line.partition(":")[0] for line in lines if not line.startswith(" ")] == list(METHODS)
    assert "    Bolya et al. 2023, Token Merging" in lines
    listed = json.loads((tmp_path / "methods.json").read_text())["results"]["methods"]
    assert all(method["what"] for method in listed)
    departs = {method["name"]: method["departs"] for method in listed}
    known = {
        "evit": "keep rate from the start",
        "tome": "proportional in every model",
        "tome-decreasing": "running sum is rounded",
        "atm": "in every block",
        "ats": "charges attention for all tokens",
        "evo-vit": "the paper always trains",
    }
    for name, words in known.items():
        assert words in departs[name]
        assert departs[name] in ran.out
    check_refused(
        diffrate_cli("compare", "--model", "vit_tiny_patch16_224", "--methods", "tome"), "give --data-dir"
    )
