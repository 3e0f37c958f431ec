"""The files of reproduce/ that train, and those that are timed side by side."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch

import diffrate
from conftest import REPRODUCE
from diffrate import DiffRateError, embedded
from diffrate.training import FINETUNE


def test_runs_with_training_are_compared_with_those_without(
    load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def narrow(pretrained: bool = True, **kwargs: object) -> torch.nn.Module:
        torch.manual_seed(0)
        shape = {"img_size": 28, "patch_size": 7, "in_chans": 1, "embed_dim": 16, "num_heads": 1, "depth": 4}
        return timm.create_model("vit_tiny_patch16_224", num_classes=10, **shape, **kwargs)

    module, search = load("with_training"), embedded.dataset("search")
    monkeypatch.setattr(embedded, "model", narrow)
    monkeypatch.setattr(module, "training_sets", lambda _: (search, search, embedded.dataset("test")))
    arguments = argparse.Namespace(
        data_dir=tmp_path, budgets="70%", seeds=2, tune_epochs=2, tune_lr=1e-3, epochs=1, search_steps=1,
        images=512, test_images=50, workers=0, minutes=0.1, device="cpu", json=tmp_path / "rows.json",
        methods="dynamicvit,evo-vit,evit,ats", resume=False, compile=False,
    )  # fmt: skip
    module.run(arguments)
    saved = json.loads((tmp_path / "rows.json").read_text())["results"]
    rivals = [f"{name}, fine-tuned" for name in ("dynamicvit", "evo-vit", "evit", "ats")]
    names = ["uncompressed, from scratch", "from scratch", "from scratch"]
    names += ["uncompressed, fine-tuned", "fine-tuned", "fine-tuned", *rivals]
    assert [row["name"] for row in saved["runs"]] == names
    for row in saved["runs"][6:]:
        assert row["gmacs"] == pytest.approx(0.7 * saved["gmacs"], rel=0.1)
    by_image = [row for row in saved["runs"] if "padded_gmacs" in row]
    assert [row["name"] for row in by_image] == rivals[3:]
    assert by_image[0]["gmacs"] <= by_image[0]["padded_gmacs"] < saved["gmacs"]
    assert [row["of_epochs"] for row in saved["runs"]] == [1, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    (budget,) = saved["budgets"].values()
    tuned = [row["test_accuracy"] for row in saved["runs"][4:6]]
    assert budget["fine-tuned"]["mean"] == pytest.approx(sum(tuned) / 2)
    assert budget["gmacs"] == pytest.approx(0.7 * saved["gmacs"], rel=0.1)

    # Going on: what ran to its end stays as it is, and what did not runs again under the same schedules.
    record = json.loads((tmp_path / "rows.json").read_text())
    ended = [{**row, "epochs": row["of_epochs"]} for row in saved["runs"][:-1]]
    record["results"]["runs"] = [*ended, {**saved["runs"][-1], "epochs": 0}]
    (tmp_path / "rows.json").write_text(json.dumps(record))
    monkeypatch.setattr(module.diffrate, "search", lambda *_, **__: pytest.fail("searched again"))
    module.run(argparse.Namespace(**{**vars(arguments), "resume": True}))
    again = json.loads((tmp_path / "rows.json").read_text())["results"]
    assert again["runs"][:-1] == ended
    assert [row["name"] for row in again["runs"]] == names
    for what in ("seed", "of_epochs"):
        assert again["runs"][-1][what] == saved["runs"][-1][what]
    assert again["budgets"].keys() == saved["budgets"].keys()
    # With more epochs, those that had fewer run again.
    again["runs"] = [{**row, "epochs": row["of_epochs"]} for row in again["runs"]]
    (tmp_path / "rows.json").write_text(json.dumps({**record, "results": again}))
    module.run(argparse.Namespace(**{**vars(arguments), "resume": True, "epochs": 2, "minutes": 1.0}))
    longer = json.loads((tmp_path / "rows.json").read_text())["results"]
    assert longer["runs"][:7] == again["runs"][3:]
    assert [(row["name"], row["epochs"]) for row in longer["runs"][7:]] == [(name, 2) for name in names[:3]]
    # With fewer, and without other methods, everything stays.
    shorter = {"resume": True, "tune_epochs": 1, "epochs": 1, "methods": ""}
    monkeypatch.setattr(module, "run_job", lambda _: pytest.fail("ran again"))
    cut_off = {**longer["runs"][-1], "name": "tome, fine-tuned", "epochs": 1}
    kept = {**longer, "runs": [*longer["runs"], cut_off]}
    (tmp_path / "rows.json").write_text(json.dumps({**record, "results": kept}))
    assert module.run(argparse.Namespace(**{**vars(arguments), **shorter}))["runs"] == kept["runs"]
    with pytest.raises(DiffRateError, match="--resume needs --json with the file of an earlier run"):
        module.run(argparse.Namespace(**{**vars(arguments), "resume": True, "json": tmp_path / "none.json"}))


def test_lost_accuracy_that_came_back(load) -> None:
    row = {"name": "fine-tuned", "budget": "50%", "test_accuracy": 91.5}
    results = {"uncompressed": 92.0, "budgets": {"50%": {"without tuning": 90.0}}, "runs": [row]}
    load("with_training").summarise(results)
    assert results["budgets"]["50%"]["recovered"] == pytest.approx(0.75)
    results["runs"] = []
    load("with_training").summarise(results)
    assert results["budgets"]["50%"] == {"without tuning": 90.0}


def test_benchmarks_side_by_side_are_timed_one_at_a_time(load, tmp_path: Path) -> None:
    """Each notes when its turn begins and ends; one that fails before its turn holds nobody up."""
    script = f"""
import sys, time
sys.path.insert(0, {str(REPRODUCE)!r})
from turns import Turns
turns, name = Turns({str(tmp_path / "turns")!r} + ",3"), sys.argv[1]
if name == "fails":
    sys.exit(1)
with turns.turn():
    begin = time.monotonic()
    time.sleep(0.5)
    print(begin, time.monotonic())
"""
    runs = {
        name: subprocess.Popen([sys.executable, "-c", script, name], stdout=subprocess.PIPE, text=True)
        for name in ("fails", "one", "two")
    }
    said = {name: run.communicate(timeout=120)[0] for name, run in runs.items()}
    assert runs["fails"].returncode == 1
    first, second = sorted(tuple(map(float, said[name].split())) for name in ("one", "two"))
    assert first[1] <= second[0]


def test_training_speed(load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=28, patch_size=2)
    monkeypatch.setattr(load("training_speed"), "load_model", lambda *_, **__: narrow)
    arguments = argparse.Namespace(
        model="vit_tiny_patch16_224", budgets="0.8", batch_sizes="1", modes="eager", repeats=1, minutes=5.0,
        profile=False, products=True, device="cpu", json=tmp_path / "rows.json", turns=f"{tmp_path / 'turns'},1",
    )  # fmt: skip
    load("training_speed").run(arguments)
    rows = json.loads((tmp_path / "rows.json").read_text())["results"]["rows"]
    assert [row["name"] for row in rows] == [
        "uncompressed", "uncompressed, patches by product", "oracle slice", "oracle slice, patches by product", "0.8"
    ]  # fmt: skip
    whole, oracle, ours = rows[0], rows[2], rows[4]
    assert ours["of_uncompressed"] == pytest.approx(whole["ms"] / ours["ms"])
    assert ours["of_oracle"] == pytest.approx(oracle["ms"] / ours["ms"])


def test_tuning_on_the_images_of_a_search(load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(pretrained: bool = True, **kwargs: object) -> torch.nn.Module:
        torch.manual_seed(0)
        shape = {"img_size": 28, "patch_size": 7, "in_chans": 1, "embed_dim": 16, "num_heads": 1, "depth": 4}
        return timm.create_model("vit_tiny_patch16_224", num_classes=10, **shape, **kwargs)

    module, setting = load("tuning_few_images"), load("setting")
    monkeypatch.setattr(embedded, "model", narrow)
    kept = tmp_path / "mine.json"
    diffrate.Schedule([17, 12, 9, 1], [17, 12, 9, 1]).save(kept)
    file = tmp_path / "rows.json"
    cost = diffrate.gmacs(narrow(), diffrate.Schedule.load(kept))
    flags = ["--budgets", f"{cost:.9f}G", "--images", "40", "--workers", "0", "--epochs", "1", "--lr", "1e-3"]
    monkeypatch.setattr(sys, "argv", ["tuning", *flags, "--schedule", str(kept), "--json", str(file)])
    monkeypatch.setattr(setting.Setting, "search", lambda *_: pytest.fail("searched"))
    module.main()
    saved = json.loads(file.read_text())["results"]
    rows = {row["name"]: row for row in saved["tables"]["tuning_few_images"]["rows"]}
    assert list(rows) == ["uncompressed, distilled", "uncompressed, by labels", *module.ROWS]
    for name, row in rows.items():
        whole = name.startswith("uncompressed")
        assert row["gmacs"] == pytest.approx(saved["gmacs"] if whole else cost, rel=0.1)
    losses = [rows[f"search, {how}"]["loss_rise"] for how in ("not tuned", "distilled", "by labels")]
    assert len(set(losses)) == 3  # weights moved, and differently
    assert abs(rows["uncompressed, distilled"]["loss_rise"]) < 0.02  # its own teacher
    by_labels = module.recipe_of(module.LABELS, "vit", 30, 2e-5)
    assert replace(by_labels, batch_size=1024) == FINETUNE
