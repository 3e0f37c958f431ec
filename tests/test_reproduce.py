"""The files of reproduce/: they run and save what they measure; the race ends as a full evaluation would."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from PIL import Image
from torch.utils.data import Subset

import diffrate
from conftest import random_vit
from diffrate import DiffRateError, embedded
from diffrate.methods.schedules import random_schedules
from diffrate.searching import fast

FOLDER = Path(__file__).resolve().parents[1] / "reproduce"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a file of reproduce/ by its name, without leaving its neighbours importable."""
    if not FOLDER.is_dir():
        pytest.skip("reproduce/ is part of a checkout, not of the package")
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def small(load, tmp_path: Path) -> object:
    """12 blocks and 197 tokens, as published schedules need, but narrow and untrained; 12 images."""
    torch.manual_seed(0)
    shape = {"img_size": 28, "patch_size": 2, "in_chans": 1, "embed_dim": 8, "num_heads": 1, "depth": 12}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **shape).eval()
    images, labels = embedded.images("test")
    val = [(embedded.normalise(images[i : i + 6, None]), labels[i : i + 6]) for i in (0, 6)]
    data = Subset(embedded.dataset("search"), range(20))
    budgets = [0.6 * diffrate.gmacs(model)]
    return load("setting").Setting(
        "small", model, val, (data, data), Accelerator(cpu=True), budgets, 1, 4, 0, tmp_path / "rows.json"
    )


@pytest.mark.slow
def test_every_experiment_saves_its_rows(
    load, small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load("optimisation_time"), "STEPS", (1, 2))
    monkeypatch.setattr(load("number_of_images"), "COUNTS", (16, 4000))
    names = [
        "off_the_shelf",
        "improvements",
        "sorting_metric",
        "operation_order",
        "transfer",
        "number_of_images",
        "optimisation_time",
    ]
    for name in names:
        load(name).run(small)
    load("schedule_comparison").run(small, 3)
    saved = json.loads((tmp_path / "rows.json").read_text())["results"]["tables"]
    assert list(saved) == [*names, "schedule_comparison"]
    for table in saved.values():
        assert table["paper"]
        for row in table["rows"]:
            assert "gmacs" in row or "left_out" in row or "better" in row or "lowest_loss" in row
            if "gmacs" in row:
                assert row["gmacs"] == pytest.approx(small.budgets[0], rel=0.01)
                assert row["points_interval"][0] <= row["points"] <= row["points_interval"][1]
    assert [row["images"] for row in saved["number_of_images"]["rows"]] == [16, 20]
    names = [row["name"] for row in saved["off_the_shelf"]["rows"]]
    assert [name for name in names if "operator" not in name] == list(diffrate.methods.METHODS)


@pytest.mark.slow
def test_rows_off_the_shelf_are_held_against_the_search(
    load, small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("off_the_shelf")
    monkeypatch.setattr(module, "METHODS", ["search", "evit", "constant-rate", "published", "ats"])
    monkeypatch.setattr("diffrate.methods.fit.TOLERANCE", 1e-9)  # whole tokens miss any budget by more
    small.model = embedded.model()  # a trained one, far below what it costs: methods disagree
    budget = 0.31 * diffrate.gmacs(small.model)
    small.budgets = [budget]
    module.run(small)
    saved = json.loads((tmp_path / "rows.json").read_text())["results"]["tables"]["off_the_shelf"]["rows"]
    rows = {row["name"]: row for row in saved}
    names = ["search", "evit", "constant-rate", "published", "published, the search's operator", "ats"]
    # A floor is the search's decision, and constant-rate has none.
    floored = rows["search"]["settings"]["operator"]["floor"] > 0
    names[3:3] = ["constant-rate, the search's operator"] * floored
    assert list(rows) == names
    images, labels = (torch.cat(parts) for parts in zip(*small.val, strict=True))

    def outcome(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            logits = model(images)
        return logits.argmax(1) == labels, F.cross_entropy(logits, labels, reduction="none")

    schedule = diffrate.Schedule.from_dict(rows["search"]["settings"]["schedule"])
    right, loss = outcome(diffrate.compress(small.model, schedule))
    evit_right, evit_loss = outcome(diffrate.methods.build("evit", small.model, budget))
    gained, lost = int((evit_right & ~right).sum()), int((right & ~evit_right).sum())
    assert gained + lost > 0
    found = rows["evit"]["to_search"]
    assert found["points"] == pytest.approx(100 * (gained - lost) / 12)
    assert found["loss_difference"] == pytest.approx((evit_loss - loss).mean().item(), rel=1e-4)
    assert found["loss_interval"][0] <= found["loss_difference"] <= found["loss_interval"][1]
    assert found["points_interval"][0] <= found["points"] <= found["points_interval"][1]
    tail = sum(math.comb(gained + lost, k) for k in range(min(gained, lost) + 1)) / 2 ** (gained + lost)
    assert found["mcnemar_p"] == pytest.approx(min(1, 2 * tail))
    assert "to_search" not in rows["search"]
    assert all("to_search" in rows[name] for name in names[1:])  # the last one is saved, too
    assert rows["published"]["operator"] == "the paper's"
    merged = "operation merge, mean attention, choice cost"
    assert rows["search"]["operator"].startswith(merged)
    assert rows["published, the search's operator"]["operator"] == rows["search"]["operator"]
    assert "operator" not in rows["evit"]
    off = 100 * (diffrate.gmacs(diffrate.methods.build("evit", small.model, budget)) / budget - 1)
    assert rows["evit"]["note"] == f"{off:+.1f} % off the budget"
    assert rows["ats"]["padded_gmacs"] > rows["ats"]["gmacs"]


def test_each_part_of_the_default_operator_is_left_out_once(load) -> None:
    variants = list(load("improvements").VARIANTS.values())
    default = {"operation": "merge", "mean": "attention", "choice": "cost", "keep_norm": True}
    for part, plain in {
        "operation": "prune-merge",
        "mean": "plain",
        "choice": "rank",
        "keep_norm": False,
    }.items():
        wanted = diffrate.Operator(**{**default, part: plain})
        assert wanted in [diffrate.Operator(**changes) for changes in variants], part


def test_pictures_of_each_method(load, small, tmp_path: Path) -> None:
    load("visualisation").run(small, tmp_path / "tokens.png", images=2)
    with Image.open(tmp_path / "tokens.png") as picture:
        assert picture.height > 6 * 168  # three methods for each of two images


def test_no_row_is_measured_after_the_deadline(load, small) -> None:
    assert small.whole.images == 12
    small.deadline = time.monotonic() - 1
    with pytest.raises(load("setting").OutOfTimeError):
        load("sorting_metric").run(small)


@pytest.mark.parametrize("by", ["loss", "divergence"])
def test_the_race_ends_as_a_full_evaluation_does(load, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    module: ModuleType = load("schedule_comparison")
    model = random_vit(depth=6)
    images, labels = torch.randn(40, 3, 32, 32), torch.randint(7, (40,))
    cost = diffrate.gmacs(model)
    schedules = random_schedules(model, 0.7 * cost, range(10)) + random_schedules(model, 0.3 * cost, range(5))
    reference = random_schedules(model, 0.8 * cost, [99])[0]
    many = load("many_schedules").ManySchedules(model, images, labels)

    def loss(schedule: diffrate.Schedule) -> float:
        with torch.no_grad():
            answers, whole = diffrate.compress(model, schedule)(images), model(images)
        if by == "loss":
            return F.cross_entropy(answers, labels).item()
        return F.kl_div(answers.log_softmax(-1), whole.softmax(-1), reduction="batchmean").item()

    losses = [loss(schedule) for schedule in schedules]
    monkeypatch.setattr(module, "FIRST", {"cpu": 8})
    monkeypatch.setattr(module, "SURELY", float("inf"))  # nobody is out early
    full = module.race(many, reference, schedules, by)
    assert full.entered == [15, 15, 15, 15]
    assert full.images == [8, 16, 32, 40]
    assert full.better == sum(value < loss(reference) for value in losses)
    assert full.best == losses.index(min(losses))
    assert full.best_rise == pytest.approx(min(losses) - loss(reference), abs=1e-5)
    monkeypatch.setattr(module, "SURELY", 1.0)
    short = module.race(many, reference, schedules, by)
    assert short.entered[-1] < 15
    assert len(short.out) >= 15 - short.entered[-1]
    out = [schedules[i] for i in short.out]
    missed = module.audit(many, reference, out, by)
    assert missed == sum(losses[i] < loss(reference) for i in short.out)
    assert short.better + missed == full.better
    assert full.out == []
    worse = max(range(15), key=losses.__getitem__)  # a reference that most others beat
    assert module.audit(many, schedules[worse], schedules, by) == sum(x < losses[worse] for x in losses) > 10


def test_who_goes_on_in_the_race(load) -> None:
    module: ModuleType = load("schedule_comparison")
    means = [-0.2, 0.0, 0.4, 0.5]
    n, deviation = 101, 2.0  # a standard error of 0.2
    sums = torch.tensor([[m * n, (deviation**2 + m * m) * n] for m in means], dtype=torch.float64)
    assert module.survivors([3, 2, 1, 0], sums, n) == [2, 1, 0]  # the last is worse by 2.5 of them
    drawn = torch.randn(5000, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = torch.stack([drawn.sum(1), drawn.square().sum(1)], 1)
    out = 5000 - len(module.survivors(range(5000), sums, 64))
    assert out / 50 == pytest.approx(1.0, rel=0.4)  # percent of those that are no worse


def test_processes_have_the_losses_of_each_schedule_alone(load, monkeypatch: pytest.MonkeyPatch) -> None:
    module: ModuleType = load("many_schedules")
    monkeypatch.setattr(module, "EACH", 2)
    model = random_vit(depth=5)
    images, labels = torch.randn(4, 3, 32, 32), torch.randint(7, (4,))
    schedules = random_schedules(
        model, 0.5 * diffrate.gmacs(model), range(5), fast.OPERATOR, last_is_free=True
    )
    with module.ManySchedules(model, images, labels, workers=2) as many:
        found = many.each(schedules, slice(1, 3), "loss")
    with torch.no_grad():
        logits = [diffrate.compress(model, schedule)(images[1:3]) for schedule in schedules]
    alone = torch.stack([F.cross_entropy(each, labels[1:3], reduction="none") for each in logits])
    torch.testing.assert_close(found, alone.double(), rtol=1e-5, atol=1e-6)
    assert len({tuple(row) for row in found.tolist()}) == 5


@pytest.mark.slow
def test_published_schedules_cost_what_the_paper_says(load) -> None:
    rows = list(load("schedules_table").rows())
    assert len(rows) > 20
    for row in rows:
        assert row["gmacs"] == pytest.approx(row["paper_gmacs"], rel=0.1)  # the paper writes 0.6 for 0.655


def test_overhead(load) -> None:
    overhead = load("overhead")
    for key, value in overhead.PAPER.items():
        assert overhead.formulas()[key] == pytest.approx(value, rel=0.02)
    counted = overhead.counted("deit_tiny_patch16_224", 0.8)
    assert 0 < counted["overhead_percent"] < 1


def test_a_table_without_images_is_saved_as_the_page_reads_it(
    load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, overhead = tmp_path / "reproduce_overhead.json", load("overhead")
    monkeypatch.setattr(sys, "argv", ["reproduce/overhead.py", "--json", str(file)])
    rows = ({"name": name, "overhead_percent": 0.25} for name in (overhead.FORMULAS, *overhead.MODELS))
    load("setting").without_images("doc", "overhead", overhead.TITLE, overhead.PAPER, rows)
    assert "deit_base_patch16_224              overhead_percent 0.25\n" in capsys.readouterr().out
    assert json.loads(file.read_text())["command"] == f"python reproduce/overhead.py --json {file}"
    text = load("page").page(tmp_path)
    assert "## Without images\n\n[reproduce_overhead.json]" in text
    assert "| deit_base_patch16_224 | 0.25 |" in text
    assert (
        "| Overhead | `overhead.py` |  |  | [reproduce_overhead.json](../results/reproduce_overhead.json) |"
        in text
    )


def test_all_experiments_each_save_a_file_that_the_page_reads(
    load, small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: ModuleType = load("all")
    found = module.results_file(Path("results"), "vit_tiny_patch16_224.augreg", "transfer", "NVIDIA H200")
    assert found == Path("results/reproduce_vit_tiny_transfer_h200.json")
    monkeypatch.setattr(module.shared, "setting", lambda _: small)
    tables = {"one": "sorting_metric", "two": "transfer"}
    monkeypatch.setattr(
        module,
        "experiments",
        lambda _=0: {
            name: lambda setting, key=key: load("setting").Table(setting, key, key, "a figure").add("x")
            for name, key in tables.items()
        },
    )
    monkeypatch.setattr(sys, "argv", ["all.py", "--json-dir", str(tmp_path / "results")])
    module.main()
    for name, key in tables.items():
        saved = json.loads((tmp_path / "results" / f"reproduce_small_{name}_cpu.json").read_text())
        assert list(saved["results"]["tables"]) == [key]


def test_what_an_experiment_saves_is_on_the_page(load, small, tmp_path: Path) -> None:
    load("sorting_metric").run(small)
    (tmp_path / "rows.json").rename(tmp_path / "reproduce_small.json")
    text = load("page").page(tmp_path)
    (row,) = [row for row in small.tables["sorting_metric"]["rows"] if row["name"] == "image-attention"]
    assert f"| image-attention | {row['gmacs']:.3f} | {row['top1']:.2f} | {row['points']:+.2f} [" in text
    link = "[reproduce_small.json](../results/reproduce_small.json) (in part: 1 of 3 budgets)"
    assert (
        f"| Ablation, sorting metric | `sorting_metric.py` | small | {small.budgets[0]:.3g} | {link} |"
        in text
    )
    assert "| Ablation, compression module | `operation_order.py` | embedded |  | not run |" in text


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
        methods="dynamicvit,evo-vit,evit", resume=False, compile=False,
    )  # fmt: skip
    module.run(arguments)
    saved = json.loads((tmp_path / "rows.json").read_text())["results"]
    rivals = ["dynamicvit, fine-tuned", "evo-vit, fine-tuned", "evit, fine-tuned"]
    names = ["uncompressed, from scratch", "from scratch", "from scratch"]
    names += ["uncompressed, fine-tuned", "fine-tuned", "fine-tuned", *rivals]
    assert [row["name"] for row in saved["runs"]] == names
    for row in saved["runs"][6:]:
        assert row["gmacs"] == pytest.approx(0.7 * saved["gmacs"], rel=0.1)
    assert [row["of_epochs"] for row in saved["runs"]] == [1, 1, 1, 2, 2, 2, 2, 2, 2]
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
    assert longer["runs"][:6] == again["runs"][3:]
    assert [(row["name"], row["epochs"]) for row in longer["runs"][6:]] == [(name, 2) for name in names[:3]]
    with pytest.raises(DiffRateError, match="--resume needs --json with the file of an earlier run"):
        module.run(argparse.Namespace(**{**vars(arguments), "resume": True, "json": tmp_path / "none.json"}))


def test_lost_accuracy_that_came_back(load) -> None:
    row = {"name": "fine-tuned", "budget": "50%", "test_accuracy": 91.5}
    results = {"uncompressed": 92.0, "budgets": {"50%": {"without tuning": 90.0}}, "runs": [row]}
    load("with_training").summarise(results)
    assert results["budgets"]["50%"]["recovered"] == pytest.approx(0.75)


def test_benchmarks_side_by_side_are_timed_one_at_a_time(load, tmp_path: Path) -> None:
    """Each notes when its turn begins and ends; one that fails before its turn holds nobody up."""
    script = f"""
import sys, time
sys.path.insert(0, {str(FOLDER)!r})
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
