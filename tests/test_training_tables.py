"""The tables of docs/training.md and docs/cluster.md are those of the results, and their arithmetic is right."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tables():
    if not (ROOT / "reproduce").is_dir() or not (ROOT / "docs").is_dir():
        pytest.skip("reproduce/ and docs/ are part of a checkout, not of the package")
    return runpy.run_path(str(ROOT / "reproduce" / "training_tables.py"))


def test_the_documented_tables_are_up_to_date(tables):
    for path, text in tables["pages"](ROOT / "results").items():
        assert path.read_text(encoding="utf-8") == text, "run python reproduce/training_tables.py"


def test_speed(tables):
    common = {"mode": "eager", "batch_size": 256}
    rows = [
        {**common, "name": "uncompressed", "gmacs": 4.6, "images_per_second": 1000.0, "of_oracle": None},
        {**common, "name": "oracle slice, 2.9", "gmacs": 2.9, "images_per_second": 1600.0, "of_oracle": None},
        {**common, "name": "2.9", "gmacs": 2.9, "images_per_second": 1520.0, "of_oracle": 0.95},
        {**common, "name": "2.9, plain", "gmacs": 2.9, "images_per_second": 1.0, "of_oracle": 0.1},
    ]
    for row in rows:
        row["of_uncompressed"] = row["images_per_second"] / 1000
    lines = tables["speed"]({"results": {"rows": rows}}).splitlines()
    assert lines[2:] == ["| 2.90 | 256 | eager | 1,520 | 1,600 | 1,000 | 0.95 | 1.52 |"]


def test_expected_hours(tables):
    hours = tables["expected_hours"]
    # 30 epochs in steps of 128 images that take 36 ms: 300,273 steps, 3.00 hours
    assert hours(36.0, 30, 1, 128, "deit_small_patch16_224") == pytest.approx(
        30 * 1_281_167 / 128 * 0.036 / 3600
    )
    # 32 GPUs: a 32nd of the steps, each longer by 2 * 31/32 * 88.2 MB at 40 GB/s = 4.27 ms
    expected = 30 * 1_281_167 / 4096 * (0.036 + 2 * 31 / 32 * 88_202_656 / 40e9) / 3600
    assert hours(36.0, 30, 32, 128, "deit_small_patch16_224") == pytest.approx(expected)


def test_times(tables):
    row = {"name": "2.9", "mode": "eager", "batch_size": 256, "gmacs": 2.9, "ms": 40.0}
    small = {**row, "batch_size": 128, "ms": 30.0}
    graph = {**row, "mode": "compiled-graph", "ms": 20.0}
    rows = [row, {**row, "name": "oracle slice, 2.9"}, {**row, "name": "2.9, plain"}, dict(row), small, graph]
    rows += [{**row, "mode": "compiled"}]  # which the trainer does not do
    lines = tables["times"]({"results": {"model": "other", "rows": rows}}).splitlines()
    # 37,535 steps of 1,024 images in 30 epochs: 25 minutes; a model without known weights exchanges nothing
    assert lines[2:] == [
        "| 2.90 G | 256 | eager | 40.0 ms | 4 | 25 min | 4.2 h |",
        "| 2.90 G | 128 | eager | 30.0 ms | 8 | 19 min | 3.1 h |",
        "| 2.90 G | 128 | eager | 30.0 ms | 32 | 5 min | 47 min |",
        "| 2.90 G | 256 | compiled-graph | 20.0 ms | 1 | 50 min | 8.3 h |",
        "| 2.90 G | 256 | compiled-graph | 20.0 ms | 4 | 13 min | 2.1 h |",
    ]


def test_a_table_of_several_runs_names_all_their_commits(tables):
    record = {"command": "x", "device": "y", "torch": "2", "commit": "b" * 40}
    assert "commit bbbbbbbbbb (" in tables["origin"]({**record, "results": {}}, "z.json")
    rows = [{"commit": "a" * 40}, {"commit": "a" * 40}, {}]
    found = tables["origin"]({**record, "results": {"rows": rows}}, "z.json")
    assert "commits aaaaaaaaaa, bbbbbbbbbb (" in found


def test_accuracy(tables):
    budget = {"gmacs": 0.175, "without tuning": 90.0, "recovered": 0.75}
    budget["fine-tuned"] = {"mean": 91.5, "deviation": 0.123, "runs": 3}
    run = {"name": "uncompressed, fine-tuned", "test_accuracy": 92.1, "epochs": 4, "of_epochs": 5}
    results = {
        "gmacs": 0.35,
        "uncompressed": 92.0,
        "test_images": 10_000,
        "budgets": {"50%": budget},
        "runs": [run, {**run, "name": "uncompressed, from scratch", "test_accuracy": 91.9}],
    }
    text = tables["accuracy"]({"results": results})
    assert "| all (0.350 G) | 92.00 | 92.10 | 91.90 | |" in text
    assert "Epochs: uncompressed, fine-tuned 4 of 5; uncompressed, from scratch 4 of 5." in text
    assert "| 50% (0.175 G) | 90.00 | 91.50 ± 0.12 |  | 75% |" in text
