"""What is measured on images, against a slow computation of the same."""

import base64
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import diffrate
from diffrate.errors import DiffRateError
from diffrate.report.measured import Shown, is_measured, measure, searched_name
from diffrate.report.run import read_run
from report.runs import HOSTILE, SCHEDULE, SCRIPT, batches, measured_run, plain_run, tiny_model

SHOWN = Shown((0.5,) * 3, (0.5,) * 3, HOSTILE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measured_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def answers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images, labels, and the logits of the whole and of the compressed model."""
    images, labels = (torch.cat(part) for part in zip(*batches(), strict=True))
    model = tiny_model()
    with torch.no_grad():
        return images, labels, model(images), diffrate.compress(model, SCHEDULE)(images)


def test_models_and_classes(folder: Path, answers) -> None:
    _, labels, whole, found = answers
    results = read_run(folder).measured["results"]
    assert [row["name"] for row in results["models"]] == [
        "uncompressed",
        "diffrate search",
        "tome",
        "resolution",
    ]
    assert results["found"] == ["diffrate search"]
    assert results["left_out"] == []
    for row, logits in zip(results["models"], (whole, found), strict=False):
        assert row["top1"] == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
        assert row["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
        assert row["images"] == 30
    assert results["models"][1]["gmacs"] == diffrate.gmacs(tiny_model(), SCHEDULE)
    for i, of_class in enumerate(results["classes"]):
        mine = labels == i
        assert of_class["name"] == HOSTILE[i]
        assert of_class["images"] == 10
        assert of_class["before"] == int((whole.argmax(1) == labels)[mine].sum())
        assert of_class["after"] == int((found.argmax(1) == labels)[mine].sum())
        rise = F.cross_entropy(found[mine], labels[mine]) - F.cross_entropy(whole[mine], labels[mine])
        assert of_class["loss_rise"] == pytest.approx(rise.item(), abs=1e-5)


def test_pictures(folder: Path, answers) -> None:
    images, labels, whole, found = answers
    pictures = read_run(folder).measured["results"]["pictures"]
    assert [picture["changed"] for picture in pictures] == [True] * 4 + [False] * 4
    nll = [F.cross_entropy(logits, labels, reduction="none") for logits in (whole, found)]
    change = (nll[1] - nll[0]).abs()
    places = [int(picture["name"].rsplit("-", 1)[1].removesuffix(".png")) for picture in pictures]
    assert places[:4] == change.topk(4).indices.tolist()
    assert len(set(places)) == 8
    assert len({picture["before"]["class"] for picture in pictures}) > 1
    trace = diffrate.compress(tiny_model(), SCHEDULE).trace(images)
    for place, picture in zip(places, pictures, strict=True):
        assert picture["label"] == HOSTILE[place % 3]
        for when, logits in (("before", whole), ("after", found)):
            shares = logits[place].softmax(0)
            assert picture[when]["share"] == pytest.approx(shares.max().item(), abs=1e-5)
            assert picture[when]["class"] == HOSTILE[int(shares.argmax())]
            assert picture[when]["correct"] == (int(shares.argmax()) == int(labels[place]))
        kind, _, encoded = picture["image"].partition(",")
        assert kind == "data:image/png;base64"
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))))
        expected = (255 * (images[place] * 0.5 + 0.5).clamp(0, 1)).round().byte().permute(1, 2, 0).numpy()
        assert (pixels == expected).all()
        assert (picture["size"], picture["grid"]) == ([32, 32], [4, 4])
        colours = np.array(list(bytes.fromhex(picture["colours"]))).reshape(4, 4, 3)
        means = expected.reshape(4, 8, 4, 8, 3).astype(float).mean(axis=(1, 3))
        assert np.abs(colours - means).max() <= 0.5 + 1e-9
        for block, tokens in zip(picture["blocks"], trace, strict=True):
            numbers = list(map(int, block["tokens"].split()))
            patches, masses = tokens.patches[place].tolist(), list(map(float, block["mass"].split()))
            assert len(masses) == len({p for p in patches if p >= 0})
            for patch, number in zip(patches, numbers, strict=True):
                assert (number < 0) == (patch < 0)
                if patch >= 0:
                    assert masses[number] == pytest.approx(tokens.sizes()[place, patch].item(), rel=1e-3)


def test_what_was_measured_is_recognised(folder: Path) -> None:
    run = read_run(folder)
    assert is_measured(run)
    assert is_measured(run, {"data": SCRIPT})
    assert not is_measured(run, {"data": "other"})
    assert not is_measured(replace(run, measured={}))
    older = {**run.measured, "results": {**run.measured["results"], "version": 0}}
    assert not is_measured(replace(run, measured=older))
    assert not is_measured(replace(run, schedules=[replace(SCHEDULE, merge=(17, 12, 7, 3))]))
    assert json.loads((folder / "measured.json").read_text())["torch"] == torch.__version__


def test_methods_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    run = read_run(plain_run(tmp_path))
    measure(run, tiny_model(), batches(4), SHOWN, ["ats"], 2)
    results = read_run(tmp_path).measured["results"]
    assert [row["name"] for row in results["models"]] == ["uncompressed", "diffrate search"]
    assert results["left_out"][0].startswith("ats: ATS decides image by image")
    with pytest.raises(DiffRateError, match="no method 'none'"):
        measure(run, tiny_model(), batches(4), SHOWN, ["none"])


def test_every_budget_has_its_row(tmp_path: Path) -> None:
    looser = replace(SCHEDULE, merge=(17, 13, 9, 4), prune=(17, 15, 11, 4), made={"budget": "80%"})
    run = replace(read_run(plain_run(tmp_path)), schedules=[looser, SCHEDULE])
    assert searched_name(looser, run.schedules) == "diffrate search, 80%"
    measure(run, tiny_model(), batches(4), SHOWN, [], 2)
    results = read_run(tmp_path).measured["results"]
    assert [r["name"] for r in results["models"]][1:] == ["diffrate search, 80%", "diffrate search, 60%"]
    assert results["found"] == ["diffrate search, 80%", "diffrate search, 60%"]
    by_hand = replace(SCHEDULE, made={"by": "--prune and --merge counts given by hand"})
    assert searched_name(by_hand, [by_hand]) == "this schedule"
