"""docs/how_good.md and docs/evidence.md: what was measured, beside the paper's numbers, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ORIGIN = {"command": "x", "device": "y", "commit": "z", "date": "2026-01-01"}


def measured(name: str, budget: float, **more: Any) -> dict[str, Any]:
    numbers = {
        "points": -1.5,
        "points_interval": [-2.0, -1.0],
        "loss_rise": 0.1,
        "loss_interval": [0.05, 0.15],
    }
    return {"name": name, "budget": budget, "gmacs": budget, "top1": 80.0, **numbers, **more}  # fmt: skip


def written(folder: Path, file: str, tables: dict[str, Any], model: str = "embedded") -> None:
    whole = {"top1": 90.0, "loss": 0.3, "images": 10}
    tables = {key: {"title": key, "paper": "a figure", **table} for key, table in tables.items()}
    results = {"model": model, "gmacs": 1.0, "uncompressed": whole, "tables": tables}
    (folder / file).write_text(json.dumps({**ORIGIN, "results": results}))


def run_lines(text: str) -> list[str]:
    return text.partition("## What was run")[2].splitlines()


def test_the_page_is_up_to_date(load) -> None:
    page = load("page")
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run python reproduce/page.py"
    assert page.EVIDENCE.read_text(encoding="utf-8") == page.evidence(), "run python reproduce/page.py"


def test_methods_are_compared_in_short_and_experiments_come_once(load, tmp_path: Path) -> None:
    rows = [measured("search", 0.9), measured("tome", 0.9), measured("search", 0.8, points=-0.25)]
    for model in ("embedded", "vit_tiny_patch16_224"):
        tables = {"transfer": {"rows": []}, "off_the_shelf": {"rows": rows}}
        written(tmp_path, f"reproduce_{model}.json", tables, model)
    page = load("page")
    short, (_, _, details) = (
        page.page(tmp_path),
        page.evidence(tmp_path).partition("## Table 1, off the shelf\n"),
    )
    assert (
        "| embedded, top-1 90.00 | 0.9 GMACs | 0.8 GMACs |\n|---|---|---|\n"
        "| search | -1.50, +0.100 | -0.25, +0.100 |\n| tome | -1.50, +0.100 |  |\n"
    ) in short
    assert short.index("| vit_tiny_patch16_224, top-1") < short.index("| embedded, top-1")
    table, _, others = details.partition("## Figure, schedule transfer\n")
    for part in (table, others.partition("\n## ")[0]):
        assert part.count("The paper: a figure.\n") == 1
        assert part.index("### vit_tiny_patch16_224, 10 images") < part.index("### embedded, 10 images")


def test_rows_say_when_they_are_off_their_budget_and_what_batches_cost(load, tmp_path: Path) -> None:
    rows = [
        measured("ats", 1.0, gmacs=1.021, padded_gmacs=1.0951),
        measured("tome", 1.0, gmacs=0.992),
        measured("tofu", 1.0, measured="a machine, commit 0123456789, 2026-01-01"),
        measured("evit", 1.0, gmacs=0.98, note="-2.0 % off the budget", operator="the paper's"),
    ]
    written(tmp_path, "reproduce_x.json", {"off_the_shelf": {"rows": rows}})
    text = load("page").evidence(tmp_path)
    assert "| ats (+2.1 % off the budget; padded to 1.095 GMACs in these batches) |  | 1.021 |" in text
    assert "| tome |  | 0.992 | 80.00 | -1.50 [-2.00, -1.00] | +0.100 [+0.050, +0.150] |" in text
    assert "| evit (-2.0 % off the budget) | the paper's | 0.980 |" in text
    assert "| tofu (measured later: a machine, commit 0123456789, 2026-01-01) |  | 1.000 |" in text


def test_compared_methods_have_their_speed_where_it_was_timed(load, tmp_path: Path) -> None:
    to = {
        "top1_difference": -0.5,
        "top1_interval": [-1.0, 0.0],
        "loss_difference": 0.1,
        "loss_interval": [0.0, 0.2],
    }
    row = {"budget": 0.8, "gmacs": 0.8, "top1": 80.0, "to_uncompressed": to, "note": "", "settings": {}}
    speed = {"images_per_second": 12345.6, "of_uncompressed": 1.456}
    rows = [
        {**row, "method": "tome", "to_first": None, "speed": speed},
        {**row, "method": "evit", "to_first": {**to, "mcnemar_p": 0.04}, "speed": None},
    ]
    whole = {"gmacs": 1.0, "top1": 80.5, "loss": 0.3, "images": 10}
    results = {"model": "small", "uncompressed": whole, "rows": rows, "left_out": ["spvit: untrained"]}
    (tmp_path / "compare_x.json").write_text(json.dumps({**ORIGIN, "results": results}))
    text = load("page").evidence(tmp_path)
    assert "| points to the first method | p | images/s | of uncompressed |\n" in text
    assert (
        "| tome | 0.800 | 80.00 | -0.50 [-1.00, +0.00] | +0.100 [+0.000, +0.200] |  |  | 12,346 | 1.46 |\n"
        in text
    )
    assert "| -0.50 [-1.00, +0.00] | 0.04 |  |  |\n" in text
    assert "\nLeft out: spvit: untrained.\n" in text


def test_rows_are_paired_with_the_search_where_that_is_known(load, tmp_path: Path) -> None:
    to = {
        "points": -0.35,
        "points_interval": [-0.9, 0.2],
        "loss_difference": 0.012,
        "loss_interval": [0.01, 0.02],
    }
    rows = [measured("search", 0.8), measured("tome", 0.8, to_search={**to, "mcnemar_p": 0.0312})]
    written(tmp_path, "reproduce_x.json", {"off_the_shelf": {"rows": rows}})
    lines = load("page").evidence(tmp_path).splitlines()
    start = lines.index(
        "| budget |  | GMACs | top-1 % | points | loss rise | points to the search | loss to the search | p |"
    )
    assert lines[start + 2].endswith("| +0.100 [+0.050, +0.150] |  |  |  |")
    assert lines[start + 3].endswith("| -0.35 [-0.90, +0.20] | +0.012 [+0.010, +0.020] | 0.031 |")


def test_the_papers_numbers_are_shown_for_each_of_its_models(load, tmp_path: Path) -> None:
    paper = {"deit_small": {"uncompressed": [4.6, 79.82], "tome": [[2.3, 77.99], [2.9, 78.89]]}}
    tables = {
        "off_the_shelf": {"rows": [], "paper": paper},
        "sorting_metric": {"rows": [], "paper": {"random": 79.72, "class-attention": 81.5}},
    }
    written(tmp_path, "reproduce_x.json", tables)
    text = load("page").evidence(tmp_path)
    assert "- deit_small: uncompressed: 79.82 at 4.6 G; tome: 77.99 at 2.3 G and 78.89 at 2.9 G\n" in text
    assert "The paper has random: 79.72; class-attention: 81.5.\n" in text
    assert "| DeiT-S | 2.5 | 79.09 | 79.61 |" in text
    assert "DiffRate: 79.41 at 2.3 G and 79.76 at 2.9 G" in text


def test_races_are_a_table_and_a_sentence_each(load, tmp_path: Path) -> None:
    race = {
        "budget": 0.655,
        "schedules": 10000,
        "seconds": 305.4,
        "runners": 12,
        "complete": True,
        "audited": 500,
    }
    race |= {"entered": [10000, 8526], "images": [64, 2000], "search": "search", "audited_better": 3}
    rows = [
        {**race, "name": "the race by loss", "better": 85, "rank_percent": 0.85, "own": 0.97654, "most_missed": 22,
         "better_in_both_halves": 21},
        {**race, "name": "the race by divergence", "better": 4, "rank_percent": 0.04, "most_missed": 1234},
    ]  # fmt: skip
    cut = {**rows[0], "budget": 0.8, "entered": [10000], "images": [64], "complete": False}
    written(tmp_path, "reproduce_x.json", {"schedule_comparison": {"rows": [*rows, cut]}})
    text = load("page").evidence(tmp_path)
    assert (
        "| 0.655 | search | loss | 0.9765 | 85 | 10,000 | 0.85 | 21 | 3 of 500 | 22 |\n"
        "| 0.655 | search | divergence |  | 4 | 10,000 | 0.04 |  | 3 of 500 | 1,234 |\n"
    ) in text
    course = "\nSchedules and images at 0.655 GMACs: 10,000 saw 64, 8,526 saw 2,000. 305 s, 12 processes.\n"
    assert text.count(course) == 1
    assert "at 0.8 GMACs: 10,000 saw 64. 305 s, 12 processes. Time ended it before the last image.\n" in text


def test_other_rows_are_a_table_and_reasons_come_once(load, tmp_path: Path) -> None:
    rows = [
        {"name": "x |V|", "lowest_loss": 1, "settings": {"schedule": [1]}},
        {"name": "spvit", "budget": 1.0, "left_out": "must be trained"},
        {"name": "spvit", "budget": 0.8, "left_out": "must be trained"},
    ]
    written(tmp_path, "reproduce_x.json", {"improvements": {"rows": rows}})
    text = load("page").evidence(tmp_path)
    assert "|  | lowest loss |\n|---|---|\n| x \\|V\\| | 1 |\n" in text
    assert "- Left out: spvit at 1, 0.8 GMACs: must be trained.\n" in text


def test_trainings_have_their_note_the_papers_numbers_and_what_was_left_out(load, tmp_path: Path) -> None:
    common = {"name": "spvit, fine-tuned", "budget": "50%", "gmacs": 0.17, "of_epochs": 4}
    runs = [{**common, "test_accuracy": 90.0, "epochs": 4}, {**common, "test_accuracy": 91.0, "epochs": 3}]
    training = {
        "model": "small", "test_images": 10, "gmacs": 0.35, "uncompressed": 92.0, "runs": runs,
        "budgets": {"50%": {"gmacs": 0.17, "without tuning": 89.0}},
        "paper": {"deit_small": {"DiffRate 2.9, tuned": 79.83}}, "left_out": ["tome cannot do that"],
    }  # fmt: skip
    record = {**ORIGIN, "results": training, "note": "It shared a GPU."}
    (tmp_path / "with_training_small.json").write_text(json.dumps(record))
    page = load("page")
    text = page.evidence(tmp_path)
    assert "| 50% | spvit, fine-tuned | 0.170 | 90.50 | 2 | 3 of 4 |" in text
    assert "Uncompressed: 0.350 GMACs, top-1 92.00. It shared a GPU.\n" in text
    assert "- deit_small: DiffRate 2.9, tuned: 79.83\n" in text
    assert "\nLeft out: tome cannot do that.\n" in text
    (line,) = [line for line in run_lines(page.page(tmp_path)) if "with_training_small.json" in line]
    assert "| small | 50% | [with_training_small.json]" in line
    assert "(in part: without uncompressed, fine-tuned; fine-tuned; uncompressed, from scratch; " in line
    assert (
        "; evit, fine-tuned; tome, fine-tuned; ats, fine-tuned; ended before the last epoch: spvit, fine-tuned) |"
        in line
    )


def test_what_was_run_on_which_model_and_at_which_budgets(load, tmp_path: Path) -> None:
    metrics = list(load("sorting_metric").PAPER)
    whole = [measured(name, budget) for budget in (0.9, 0.8, 0.7) for name in metrics]
    steps = [measured(f"{n} steps", 0.7) for n in load("optimisation_time").STEPS]
    race = {"budget": 0.7, "better": 1, "schedules": 10, "rank_percent": 10.0, "seconds": 1.0, "runners": 0}
    race |= {"entered": [10], "images": [64], "complete": False, "search": "search"}
    race |= {"audited": 0, "audited_better": 0, "most_missed": 0}
    races = [
        measured("search", 0.7),
        *({"name": f"the race by {by}", **race} for by in ("loss", "divergence")),
    ]
    left_out = {"name": "merge", "budget": 0.9, "left_out": "out of time"}
    tables = {
        "sorting_metric": {"rows": whole},
        "operation_order": {"rows": [measured("prune", 0.9), left_out]},
        "optimisation_time": {"rows": steps[:-1]},
        "schedule_comparison": {"rows": races},
        "transfer": {"rows": []},
    }
    written(tmp_path, "reproduce_a.json", tables)
    written(tmp_path, "reproduce_b.json", {"sorting_metric": {"rows": whole[:-1]}}, "vit_tiny_patch16_224")
    lines = run_lines(load("page").page(tmp_path))

    def link(name: str) -> str:
        return f"[reproduce_{name}.json](../results/reproduce_{name}.json)"

    first = "| Ablation, sorting metric | `sorting_metric.py` |"
    assert f"{first} embedded | 0.9, 0.8, 0.7 | {link('a')} |" in lines
    assert f"{first} vit_tiny_patch16_224 | 0.9, 0.8, 0.7 | {link('b')} (in part: 2 of 3 budgets) |" in lines
    start = "| Ablation, optimisation time | `optimisation_time.py` |"
    assert f"{start} embedded | 0.7 | {link('a')} (in part: without 240 steps) |" in lines
    assert f"{start} vit_tiny_patch16_224 |  | not run |" in lines
    (order,) = [line for line in lines if "| Ablation, compression module |" in line and "embedded" in line]
    assert "(in part: 1 of 3 budgets; without merge; merge-prune; prune-merge; " in order
    (raced,) = [line for line in lines if "10,000 random" in line and "embedded" in line]
    assert raced.endswith(
        "(in part: 1 of 3 budgets; 10 of 10,000 schedules; without the race by loss; the race by divergence) |"
    )
    (moved,) = [line for line in lines if "schedule transfer" in line and "embedded" in line]
    assert moved.endswith("(in part: no row) |")


def test_what_the_paper_has_and_this_has_not_is_listed(load, tmp_path: Path) -> None:
    scores = {"whole": {"miou": 60.0}, "70%": {"miou": 59.0}}
    (tmp_path / "segmentation_camvid.json").write_text(json.dumps({**ORIGIN, "results": {"scores": scores}}))
    hardware = {"model": "deit_small", "rows": {"whole": {"gmacs": 4.6}}}
    (tmp_path / "hardware_deit_small.json").write_text(json.dumps({**ORIGIN, "results": hardware}))
    lines = run_lines(load("page").page(tmp_path))
    segmented = [
        line.split(" | ")[2:4] + line.split(" | ")[4:] for line in lines if "| Segmentation |" in line
    ]
    assert segmented[0][:2] == ["ViT-Ti, CamVid", "70%"]
    assert segmented[1] == ["CAFormer-S36, ADE20k: the paper's", "", "not run |"]
    assert (
        "| Table 1, LV-ViT-S | `off_the_shelf.py --model lvvit_s` | LV-ViT-S, ImageNet |  | not run |"
        in lines
    )
    assert any(line.startswith("| Figures 1 and 5") and line.endswith("| not run |") for line in lines)
    (constraints,) = [line for line in lines if "Table 3" in line]
    assert constraints.endswith("(in part: without accuracy) |")
    (tmp_path / "visualisation_embedded.png").write_bytes(b"")
    lines = run_lines(load("page").page(tmp_path))
    assert any("| embedded |  | [visualisation_embedded.png](../results/" in line for line in lines)
