"""Pictures of files: names, formats and mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import nn

import diffrate
from conftest import TINY_FLAGS, Ran, check_refused, pixels, write_image
from diffrate.errors import DiffRateError
from diffrate.pictures import GAP, LABEL
from diffrate.visualizing import picture_names, visualize

SCHEDULE = diffrate.Schedule((17, 14, 10, 3), (17, 12, 8, 3))
AS_IS = {"crop_pct": 1.0, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


@pytest.fixture
def schedule(tmp_path: Path) -> Path:
    SCHEDULE.save(tmp_path / "schedule.json")
    return tmp_path / "schedule.json"


def test_the_first_panel_is_the_image_itself(tiny_vit: nn.Module, tmp_path: Path) -> None:
    fast = diffrate.compress(tiny_vit, SCHEDULE)
    file = write_image(tmp_path / "a.png", 3)
    (path,) = visualize(fast, [file], tmp_path / "out", ["png"], [2], **AS_IS)
    assert path == tmp_path / "out" / "a-tokens.png"
    with Image.open(path) as picture:
        shown = np.asarray(picture)
    scale = 6  # 32 pixels become at least 168
    assert shown.shape[1] == GAP + 2 * (32 * scale + GAP)
    first = shown[GAP + LABEL :, GAP : GAP + 32 * scale]
    assert (first == pixels(3).repeat(scale, 0).repeat(scale, 1)).all()


def test_images_of_any_size_and_mode(tiny_vit: nn.Module, tmp_path: Path) -> None:
    fast = diffrate.compress(tiny_vit, SCHEDULE)
    files = [write_image(tmp_path / "wide.png", 0, (20, 90)), write_image(tmp_path / "one.png", 1, (1, 1))]
    for mode in ("L", "RGBA", "P", "CMYK", "1"):
        Image.fromarray(pixels(2)).convert(mode).save(tmp_path / f"{mode}.tiff")
        files.append(tmp_path / f"{mode}.tiff")
    written = visualize(fast, files, tmp_path / "out", ["png", "gif", "webp"])
    assert len(written) == len(set(written)) == 3 * len(files)
    for path in written:
        with Image.open(path) as picture:
            assert getattr(picture, "n_frames", 1) == (1 if path.suffix == ".png" else 5)


def test_names_of_every_kind_give_files_of_their_own(tiny_vit: nn.Module, tmp_path: Path) -> None:
    odd = [
        "a.png",
        "A.PNG.png",
        "--help.png",
        "sp ace\n.png",
        "ünï☃.png",
        '<b>&".png',
        ".hidden",
        "x" * 240 + ".png",
    ]
    files = [write_image(tmp_path / "one" / "a.png", 0)]
    for i, name in enumerate(odd):
        source = write_image(tmp_path / f"{i}.png", i)
        (tmp_path / "two").mkdir(exist_ok=True)
        files.append(source.rename(tmp_path / "two" / name))
    written = visualize(diffrate.compress(tiny_vit, SCHEDULE), files, tmp_path / "out", ["png"])
    assert len({path.name.casefold() for path in written}) == len(files)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(p.name for p in written)
    assert written[1].name == "a-2-tokens.png"
    assert picture_names([Path("ü" * 200 + ".png")])[0].encode()[:80].decode(errors="strict") == "ü" * 40
    assert picture_names([Path("bad\udcff.png"), Path("...png")]) == ["bad_-tokens", "image-tokens"]


def test_nothing_is_written_when_one_image_is_bad(
    tiny_vit: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "diffrate.visualizing.AT_ONCE", 1
    )  # the good one is long done when the bad one's turn comes
    good, bad = write_image(tmp_path / "good.png", 0), tmp_path / "bad.png"
    bad.write_bytes(good.read_bytes()[:200])
    fast = diffrate.compress(tiny_vit, SCHEDULE)
    with pytest.raises(DiffRateError, match=r"cannot read the image .*bad\.png"):
        visualize(fast, [good, bad], tmp_path / "out")
    with pytest.raises(DiffRateError, match="no block 9: the model has blocks 1 to 4"):
        visualize(fast, [good], tmp_path / "out", blocks=[9])
    assert not (tmp_path / "out").exists()


def test_command(diffrate_cli: Callable[..., Ran], tmp_path: Path, schedule: Path, checkpoint: Path) -> None:
    image, out = write_image(tmp_path / "a.png", 0), tmp_path / "out"
    flags = [image, "--schedule", schedule, *TINY_FLAGS, "--checkpoint", checkpoint, "--output", out]
    ran = diffrate_cli("visualize", *flags, "--device", "cpu", "--json", tmp_path / "r.json")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines() == [str(out / "a-tokens.png"), str(out / "a-tokens.gif")]
    assert not ran.err
    saved = json.loads((tmp_path / "r.json").read_text())["results"]
    assert saved["pictures"] == ran.out.splitlines()

    wide = diffrate_cli("visualize", *flags, "--img-size", "32x64", "--format", "webp", "--blocks", "2,3")
    assert wide.code == 0, wide.err
    assert "for 17 tokens and the model has 33: it runs in proportion" in wide.err


def test_mistakes(diffrate_cli: Callable[..., Ran], tmp_path: Path, schedule: Path) -> None:
    image, out = write_image(tmp_path / "a.png", 0), tmp_path / "out"
    flags = ["--schedule", schedule, *TINY_FLAGS, "--device", "cpu", "--output", out]
    refused = [
        ([tmp_path / "none.png", *flags], "cannot read the image .*none.png: No such file or directory"),
        ([tmp_path, *flags], "cannot read the image .*: Is a directory"),
        ([schedule, *flags], "cannot read the image .*: not a known image format"),
        ([image, *flags, "--format", "bmp"], "--format takes png, gif, webp, not 'bmp'"),
        ([image, *flags, "--format", ","], "at least one image and one format"),
        ([image, *flags, "--blocks", "0"], "no block 0"),
        ([image, *flags, "--blocks", "two"], "--blocks takes one count"),
        ([image, "--schedule", schedule], "give --model"),
        ([image, "--schedule", "published:2.9"], "give --model"),
        ([image, *flags, "--output", schedule], "cannot write"),
    ]
    for arguments, sentence in refused:
        check_refused(diffrate_cli("visualize", *arguments), sentence)
    assert not out.exists()
