"""The files of reproduce/: they run and save what they measure."""

from __future__ import annotations

import gzip
import json
import math
import struct
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import diffrate
from diffrate import embedded


def test_the_embedded_model_is_measured_on_a_folder_of_fashion_mnist(load, tmp_path: Path) -> None:
    images = torch.randint(256, (12, 28, 28), dtype=torch.uint8)
    labels = torch.arange(12, dtype=torch.uint8) % 10
    for kind, values in {"images-idx3": images, "labels-idx1": labels}.items():
        head = struct.pack(f">BBBB{values.ndim}i", 0, 0, 8, values.ndim, *values.shape)
        with gzip.open(tmp_path / f"t10k-{kind}-ubyte.gz", "wb") as file:
            file.write(head + values.numpy().tobytes())
    module = load("setting")
    arguments = module.parser("").parse_args(["--val-dir", str(tmp_path), "--images", "6"])
    ((found, theirs),) = module.setting(arguments).val
    chosen = [0, 2, 4, 7, 9, 11]
    assert theirs.tolist() == [labels[i] for i in chosen]
    torch.testing.assert_close(found.cpu(), embedded.normalise(images[chosen, None]))


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
    load("ablations_searched").run(small)
    load("schedule_comparison").run(small, 3)
    saved = json.loads((tmp_path / "rows.json").read_text())["results"]["tables"]
    searched = ["sorting_metric_searched", "operation_order_searched"]
    assert list(saved) == [*names, *searched, "schedule_comparison"]
    for name in searched:
        rows = {row["name"]: row for row in saved[name]["rows"]}
        assert list(rows) == list(saved[name.removesuffix("_searched")]["paper"])
        for key, row in rows.items():
            operator = row["settings"]["schedule"]["operator"]
            assert key == operator["importance" if "metric" in name else "operation"]
            assert (operator["mean"], operator["choice"]) == ("plain", "rank")
    assert saved[searched[0]]["rows"][-1] == saved[searched[1]]["rows"][-1] | {"name": "class-attention"}
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


def test_a_method_that_is_measured_again_leaves_the_other_rows_as_they_are(
    load, small, tmp_path: Path
) -> None:
    module, (budget,) = load("off_the_shelf"), small.budgets
    schedule = diffrate.methods.schedules.random_schedule(small.model, budget)
    search = {"name": "search", "budget": budget, "settings": {"schedule": schedule.to_dict()}}
    others = [{"name": "evit", "budget": budget}, {"name": "ats", "budget": 2 * budget}]
    known = {"model": "small", "uncompressed": {"images": 12}}
    record = {"commit": "abc", "results": {**known, "tables": {"off_the_shelf": {"rows": [search, *others]}}}}
    file = tmp_path / "earlier.json"
    file.write_text(json.dumps(record))
    with pytest.raises(diffrate.DiffRateError, match="keeps the searches"):
        module.again(small, ["search"], file)
    module.again(small, ["evit", "ats"], file)
    after = json.loads(file.read_text())
    first, evit, far, ats = after["results"]["tables"]["off_the_shelf"]["rows"]
    assert (after["commit"], first, far) == ("abc", search, others[1])
    assert (evit["name"], ats["name"], ats["budget"]) == ("evit", "ats", budget)
    assert "points" in evit["to_search"]
    assert ats["gmacs"] == pytest.approx(budget, rel=0.02)
    assert evit["measured"].split(", ")[-1].startswith("20")
    assert not (tmp_path / "rows.json").exists()
    small.budgets = [3 * budget]
    with pytest.raises(diffrate.DiffRateError, match="no search at"):
        module.again(small, ["evit"], file)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"results": {"tables": {}}}'])
def test_results_that_cannot_be_read_end_in_a_sentence(load, tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "earlier.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(
        diffrate.DiffRateError, match=r"cannot read the rows of off_the_shelf in .*earlier\.json"
    ):
        load("setting").rows_in(file, "tables", "off_the_shelf")


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


def test_rivals_may_spend_before_what_their_last_block_spends_in_vain(load, small, tmp_path: Path) -> None:
    module, (budget,) = load("last_block"), small.budgets
    schedule = diffrate.methods.schedules.random_schedules(small.model, budget, [0], last_is_free=True)[0]
    rows = [{"name": "search", "budget": budget, "settings": {"schedule": schedule.to_dict()}}]
    table = {"results": {"tables": {"off_the_shelf": {"rows": rows}}}}
    (tmp_path / "searches.json").write_text(json.dumps(table))
    module.run(small, tmp_path / "searches.json")
    first, *rivals = json.loads((tmp_path / "rows.json").read_text())["results"]["tables"]["last_block"][
        "rows"
    ]
    assert diffrate.Schedule.from_dict(first["settings"]["schedule"]).merge == schedule.merge
    own = [row["name"] for row in rivals if not row["name"].endswith(", the search's operator")]
    assert own == list(module.RIVALS)
    assert {"published", "evit", "tome", "constant-rate", "random", "resolution"} <= set(own)
    for row in rivals:
        mlp = 2 * 8 * 4 * 8  # 8 and 4 x 8 features, for all but the class token
        assert row["in_vain"] == pytest.approx(mlp * patches_at_the_end(row["settings"]) / 1e9)
        assert row["gmacs"] == pytest.approx(budget, rel=0.01)
        assert row["gmacs"] <= (1 + 1e-9) * budget
        assert "to_search" in row
    rows = {row["name"]: row for row in rivals}
    mine, under_the_searchs = rows["constant-rate"], rows["constant-rate, the search's operator"]
    assert under_the_searchs["settings"]["schedule"]["merge"] == mine["settings"]["schedule"]["merge"]
    operators = [row["settings"]["schedule"]["operator"] for row in (first, mine, under_the_searchs)]
    assert operators[0] == operators[2] != operators[1]
    alone = diffrate.gmacs(diffrate.methods.build("tome", small.model, budget))
    assert rows["tome"]["gmacs"] + rows["tome"]["in_vain"] > 1.005 * alone
    small.budgets = [2 * budget]
    with pytest.raises(diffrate.DiffRateError, match="no search at"):
        module.run(small, tmp_path / "searches.json")


def patches_at_the_end(settings: dict[str, Any]) -> float:
    """Image tokens that a method carries through the MLP of its last block, on average."""
    if settings.get("method") == "resolution":
        smaller, larger = (height * width / 2**2 for height, width in settings["sizes"])
        return settings["share_of_larger"] * larger + (1 - settings["share_of_larger"]) * smaller
    kept = settings["kept"] if "kept" in settings else settings["schedule"]["merge"]
    return kept[-1] - 1


def test_calibration_of_answers_that_are_right_and_of_answers_that_are_too_sure(load, small) -> None:
    module, draw = load("calibration"), torch.Generator().manual_seed(0)
    small.model, small.json = torch.nn.Identity(), None
    logits = torch.randn(2000, 5, generator=draw, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(dim=-1), 1, generator=draw)[:, 0]
    for sureness, best in ((1.0, 1.0), (1.5, 1.5)):
        small.val = [(sureness * logits[:900], labels[:900]), (sureness * logits[900:], labels[900:])]
        module.run(small)
        rows = {row["name"]: row for row in small.tables["calibration"]["rows"]}
        as_they_are, softened = (rows[name] for name in module.ROWS)
        assert softened["temperature"] == pytest.approx(best, abs=0.1)
        assert softened["loss"] <= as_they_are["loss"]
        right = abs(as_they_are["loss"] - as_they_are["expected_loss"]) < 2 * as_they_are["standard_error"]
        assert right == (sureness == 1.0)
        tenths = [rows[f"tenth {i}"] for i in range(1, module.PARTS + 1)]
        assert [row["probability"] for row in tenths] == sorted(row["probability"] for row in tenths)
        truth = (logits.argmax(dim=-1) == labels).double().mean()
        assert sum(row["right"] for row in tenths) / module.PARTS == pytest.approx(float(truth))
        surer = [row["probability"] - row["right"] for row in tenths]
        assert (sum(surer) / module.PARTS > 0.05) == (sureness > 1)


def test_pictures_of_each_method(load, small, tmp_path: Path) -> None:
    load("visualisation").run(small, tmp_path / "tokens.png", images=2)
    with Image.open(tmp_path / "tokens.png") as picture:
        assert picture.height > 6 * 168  # three methods for each of two images


def test_no_row_is_measured_after_the_deadline(load, small) -> None:
    assert small.whole.images == 12
    small.deadline = time.monotonic() - 1
    with pytest.raises(load("setting").OutOfTimeError):
        load("sorting_metric").run(small)


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
    page = load("page")
    section = page.evidence(tmp_path).partition("\n## Overhead\n")[2].partition("\n## ")[0]
    assert "\n[reproduce_overhead.json](../results/reproduce_overhead.json): " in section
    assert "| deit_base_patch16_224 | 0.25 |" in section
    link = "[reproduce_overhead.json](../results/reproduce_overhead.json)"
    assert f"| Overhead | `overhead.py` |  |  | {link} |" in page.page(tmp_path)


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
    page = load("page")
    (row,) = [row for row in small.tables["sorting_metric"]["rows"] if row["name"] == "image-attention"]
    cells = f"| image-attention | {row['gmacs']:.3f} | {row['top1']:.2f} | {row['points']:+.2f} ["
    assert cells in page.evidence(tmp_path)
    text = page.page(tmp_path)
    link = "[reproduce_small.json](../results/reproduce_small.json) (in part: 1 of 3 budgets)"
    assert (
        f"| Ablation, sorting metric | `sorting_metric.py` | small | {small.budgets[0]:.3g} | {link} |"
        in text
    )
    assert "| Ablation, compression module | `operation_order.py` | embedded |  | not run |" in text
