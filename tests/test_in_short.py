"""The first part of docs/how_good.md: who is behind the search, how fast it is, and its rank among random schedules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from test_page import ORIGIN, measured, written


def to_search(points: float, loss: tuple[float, float], p: float = 0.5) -> dict[str, Any]:
    middle = {"points": points, "loss_difference": sum(loss) / 2, "mcnemar_p": p}
    return {**middle, "points_interval": [points - 1, points + 1], "loss_interval": loss}


def rows() -> list[dict[str, Any]]:
    return [
        measured("search", 0.9, points=0.1),
        measured("search", 0.5, points=-0.85, points_interval=[-1.7, 0.05]),
        measured("tome", 0.5, points=-3.95, to_search=to_search(-2, (0.1, 0.2), 0.049)),
        measured("evit", 0.5, to_search=to_search(-1.5, (0.01, 0.2), 0.051)),
        measured("random, the search's operator", 0.5, to_search=to_search(-0.5, (-0.01, 0.2))),
        measured("published", 0.5, points=0.5, to_search=to_search(1.5, (-0.01, 0.2), 0.001)),
        measured("resolution", 0.5, to_search=to_search(0.1, (-0.02, -0.01))),
    ]


def test_who_is_behind_the_search_and_who_cannot_be_told_from_it(load, tmp_path: Path) -> None:
    written(tmp_path, "reproduce_x.json", {"off_the_shelf": {"rows": rows()}})
    text = load("page").page(tmp_path)
    assert "- 0.9 GMACs, 90 %: the search changes top-1 by +0.10 [-2.00, -1.00] points.\n" in text
    assert (
        "- 0.5 GMACs, 50 %: the search changes top-1 by -0.85 [-1.70, +0.05] points; ahead of it: published, "
        "resolution; no clear difference to it: random under the search's operator; all others are behind it.\n"
    ) in text
    assert (
        "**embedded at 50 % of its MACs, its weights untouched: -0.85 [-1.70, +0.05] points of top-1 by a search, on "
        "10 images.**"
    ) in text
    assert "Others at the same MACs: published +0.50, tome -3.95, evit -1.50, resolution -1.50.\n" in text
    assert "| tome |  | -3.95, +0.100* |\n| evit |  | -1.50, +0.100° |\n" in text
    assert "- `tofu`: ToMe with ToFu's norm-preserving merging" in text


def test_who_changes_sides_where_nobody_pays_for_what_is_spent_in_vain(load, tmp_path: Path) -> None:
    uncharged = [
        measured("tome", 0.5, to_search=to_search(-0.5, (-0.01, 0.2))),
        measured("evit", 0.5, to_search=to_search(-1.5, (0.01, 0.2), 0.051)),
        measured("not charged before", 0.5, to_search=to_search(-2, (0.1, 0.2), 0.001)),
    ]
    tables = {"off_the_shelf": {"rows": rows()}, "last_block": {"rows": uncharged}}
    written(tmp_path, "reproduce_x.json", tables)
    page = load("page")
    text = page.page(tmp_path)
    said, _, rest = text.partition("1 of 2 rows change sides ([table](evidence.md#")[2].partition("))")
    assert rest.startswith(": no clear difference to it: tome at 0.5.\n")
    heading = next(line for line in page.evidence(tmp_path).splitlines() if "equal terms" in line)
    assert heading.removeprefix("## ").lower().replace(" ", "-").replace(":", "") == said


def test_what_batches_of_unequal_images_cost_stands_in_their_rows(load, tmp_path: Path) -> None:
    ats = [measured("ats", budget, padded_gmacs=1.04 * budget) for budget in (0.9, 0.5)]
    written(tmp_path, "reproduce_x.json", {"off_the_shelf": {"rows": [*rows(), *ats]}})
    text = load("page").page(tmp_path)
    assert "| ats | -1.50, +0.100 (0.936 in batches) | -1.50, +0.100 (0.520 in batches) |\n" in text


def test_speeds_of_a_comparison_on_a_gpu_come_with_its_plot(load, tmp_path: Path) -> None:
    written(tmp_path, "reproduce_x.json", {"off_the_shelf": {"rows": rows()}}, "small")
    speed = {"mode": "eager", "dtype": "float16", "batch_size": 100, "images_per_second": 12345.0}
    row = {"gmacs": 0.5, "top1": 80.0, "to_first": None, "note": "", "settings": {}}
    to = {"top1_difference": -0.5, "top1_interval": [-1.0, 0.0], "loss_interval": [0.0, 0.2]}
    compared = [
        {
            **row, "method": name, "budget": budget, "loss": 0.3 + rise, "speed": {**speed, "of_uncompressed": of},
            "to_uncompressed": {**to, "loss_difference": rise},
        }
        for name, budget, of, rise in (
            ("searched", 0.9, 1.1, 0.02),
            ("searched", 0.5, 1.8, 0.01),
            ("tome", 0.5, 0.7, -0.01),
        )
    ]  # fmt: skip
    compared[2]["speed"]["mode"] = "graph"
    whole = {"gmacs": 1.0, "top1": 80.5, "loss": 0.3, "images": 10, "speed": speed}
    results = {"model": "small", "uncompressed": whole, "rows": compared, "left_out": []}
    record = {**ORIGIN, "device": "NVIDIA X", "results": results}
    (tmp_path / "compare_x_h200.json").write_text(json.dumps(record))
    page = load("page")
    text = page.page(tmp_path)
    assert "points of top-1 by a search, on 10 images, and it runs 1.80 times as fast.**" in text
    assert (
        "Images per second, on an NVIDIA X (eager, float16, 100 images a batch), as multiples of the uncompressed "
        "small's 12,345 ([file](../results/compare_x_h200.json)):\n\n"
        "| times as fast | 0.9 GMACs | 0.5 GMACs |\n|---|---|---|\n| searched | 1.10 | 1.80 |\n"
        "| tome (graph) |  | 0.70 |\n\n"
    ) in text
    assert (
        " Rows that no other row beats in both speed and loss: tome at 0.5 (0.70, -0.010), searched at 0.5 (1.80, "
        "+0.010).\n"
    ) in text
    assert "(../results/compare_x_h200.png)" in text
    page.draw(tmp_path)
    assert (tmp_path / "compare_x_h200.png").stat().st_size > 1000
    other = {**record, "results": {**results, "model": "another", "rows": compared[2:]}}
    (tmp_path / "compare_a_h200.json").write_text(json.dumps(other))  # read first
    assert "on 10 images, and it runs 1.80 times as fast.**" in page.page(tmp_path)
    (tmp_path / "compare_a_h200.json").unlink()
    untimed = {**results, "uncompressed": {**whole, "speed": None}}
    (tmp_path / "compare_x_h200.json").write_text(json.dumps({**record, "results": untimed}))
    assert "Images per second, on an" not in page.page(tmp_path)
    record["device"] = "x86_64 CPU"
    (tmp_path / "compare_x_h200.json").write_text(json.dumps(record))
    assert "Images per second, on an" not in page.page(tmp_path)


def test_what_any_model_could_have_is_said_apart(load) -> None:
    module = load("in_short")
    rows = [{"method": "searched", "speed": {"of_uncompressed": times}} for times in (2.0, 3.0)]
    results: dict[str, Any] = {"model": "a model", "uncompressed": {"speed": {}}, "rows": rows}
    assert module.what_any_could_have(results) == ""
    assert not list(module.alike_row(results, 2))
    results["uncompressed"]["speed_with_kernels"] = {"of_uncompressed": 1.6}
    (beside,) = module.alike_row(results, 2)
    assert beside == ["uncompressed, with our kernels", "1.60", "1.60"]
    assert " have 1.25, 1.88 where the whole model has the same kernels (" in module.what_any_could_have(
        results
    )


def test_speeds_on_a_cpu_are_a_sentence(load) -> None:
    speed = {"mode": "eager", "dtype": "float32", "batch_size": 50, "of_uncompressed": 1.5}
    row = {"method": "tome", "budget": 0.5, "speed": speed}
    results: dict[str, Any] = {"model": "small", "uncompressed": {"speed": speed}, "rows": [row]}
    record = {"device": "a CPU", "commit": "0123456789abc", "results": results}
    said = load("in_short").elsewhere(Path("compare_x.json"), record)
    assert said == (
        "On a CPU (a CPU, eager, float32, 50 images a batch) small at 0.5 GMACs is so many times as fast: tome 1.50 "
        "([file](../results/compare_x.json), commit 0123456789).\n"
    )
    results["uncompressed"]["speed"] = None
    assert load("in_short").elsewhere(Path("compare_x.json"), record) == ""


def test_searches_in_milliseconds_and_the_papers_schedules_at_equal_time(load, tmp_path: Path) -> None:
    def row(name: str, target: float, rise: float, **more: Any) -> dict[str, Any]:
        return measured(name, 0.5, target_ms=target, speed=11 / target, **more) | {"loss_rise": rise}

    in_ms, by_rank, in_macs, theirs = load("equal_time").ROWS
    rows = [
        {"name": "uncompressed", "ms": 10.0},
        row(in_ms, 5.0, 0.01),
        row(by_rank, 5.0, 0.02, to_search=to_search(0.5, (-0.01, 0.03))),
        row(in_macs, 5.0, 0.03, to_search=to_search(0.5, (-0.01, 0.03))),
        row(theirs, 5.0, 0.04, to_search=to_search(-1.25, (0.01, 0.03))),
        row(in_ms, 4.0, 0.05),
        row(theirs, 4.0, 0.06, to_search=to_search(-3, (-0.01, 0.03), 0.001)),
    ]
    said = load("in_short").at_equal_time
    file = tmp_path / "reproduce_x.json"
    assert said({file: {"results": {"tables": {"off_the_shelf": {"rows": rows}}}}}) == ""
    records = {
        file: {"results": {"tables": {"equal_time": {"rows": rows}}}},
        tmp_path / "compare_x.json": {},
    }
    assert said(records).endswith(
        "---|\n"
        "| 2.00 | +0.010 (2.20) | +0.020 (2.20) | +0.030 (2.20) | +0.040 (2.20) | -1.25 [-2.25, -0.25] "
        "| +0.020 [+0.010, +0.030] | behind it in loss alone |\n"
        "| 2.50 | +0.050 (2.75) |  |  | +0.060 (2.75) | -3.00 [-4.00, -2.00] "
        "| +0.010 [-0.010, +0.030] | behind it in top-1 |\n\n"
    )


def test_ranks_are_those_of_searches_in_races_that_were_run_to_their_end(load, tmp_path: Path) -> None:
    race = {"budget": 0.5, "schedules": 10000, "rank_percent": 0.1, "seconds": 1.0, "runners": 1}
    race |= {"entered": [10000], "images": [10], "audited": 0, "audited_better": 0, "most_missed": 0}

    def raced(
        search: str, loss: int, divergence: int, complete: bool = True, **more: Any
    ) -> list[dict[str, Any]]:
        each = {"loss": loss, "divergence": divergence}
        return [
            {**race, "name": f"the race by {by}", "search": search, "better": n, "complete": complete, **more}
            for by, n in each.items()
        ]

    shelf = {"off_the_shelf": {"rows": rows()}}
    races = [*raced("search", 5, 0), *raced("search 2", 1234, 1), *raced("the paper's counts", 4000, 5000)]
    late = raced("search", 7, 8, complete=False, budget=0.3)
    few = raced("search", 7, 8, budget=0.2, schedules=500)
    fewer = raced("search", 7, 31, budget=0.4, schedules=2000, both_views=True)
    papers = raced("the paper's counts", 7, 8, budget=0.1)
    table = {"rows": [*races, *late, *few, *fewer, *papers]}
    written(tmp_path, "reproduce_a.json", {**shelf, "schedule_comparison": table})
    pruned = [measured("search", 0.5, operator="operation prune"), *raced("search", 300, 200)]
    written(tmp_path, "reproduce_b.json", {"schedule_comparison": {"rows": pruned}})
    lines = load("page").page(tmp_path).splitlines()
    start = lines.index("|  | GMACs | images | by loss | by divergence from the whole model |")
    assert lines[start + 2 : start + 6] == [
        "| embedded | 0.5 (50 %) | 10 | 5, 1,234 | 0, 1 |",
        "| embedded | 0.4 (40 %) | 10 and their mirror images | 7 of 2,000 | 31 of 2,000 |",
        "| embedded, pruning alone | 0.5 (50 %) | 10 | 300 | 200 |",
        "",
    ]
    assert (
        "Not in the best 1 % by loss: 1 of 2 searches (12.34 %) of embedded at 0.5 GMACs on 10 images; 1 of 1 searches "
        "(3.00 %) of embedded, pruning alone at 0.5 GMACs on 10 images."
    ) in lines
    assert (
        "Not in the best 1 % by divergence: 1 of 1 searches (1.55 %) of embedded at 0.4 GMACs on 10 images and their "
        "mirror images; 1 of 1 searches (2.00 %) of embedded, pruning alone at 0.5 GMACs on 10 "
        "images."
    ) in lines


def test_how_right_the_probabilities_are_stands_below_the_ranks(load, tmp_path: Path) -> None:
    race = {"budget": 0.5, "schedules": 10000, "rank_percent": 0.1, "seconds": 1.0, "runners": 1, "better": 5}
    race |= {"entered": [10000], "images": [10], "audited": 0, "audited_better": 0, "most_missed": 0}
    races = [
        {**race, "name": f"the race by {by}", "search": "search", "complete": True}
        for by in ("loss", "divergence")
    ]
    own = {
        "name": "as they are",
        "temperature": 1.0,
        "expected_loss": 0.9129,
        "loss": 0.9334,
        "standard_error": 0.0319,
    }
    tables = {"off_the_shelf": {"rows": rows()}, "schedule_comparison": {"rows": races}}
    written(tmp_path, "reproduce_a.json", tables)
    text, said = load("page").page(tmp_path), "How right the probabilities are: "
    assert said not in text
    calibration = {
        "rows": [own, {**own, "temperature": 1.02, "loss": 0.9331}, {"name": "tenth 1", "right": 0.5}]
    }
    written(tmp_path, "reproduce_b.json", {"calibration": calibration})
    page = load("page")
    text = page.page(tmp_path)
    assert (
        f"{said}embedded expects a loss of 0.913 of itself and has 0.933, with an error of 0.032, and would have the "
        "least, 0.933, at a temperature of 1.02 ([calibration](evidence.md#"
    ) in text
    anchor = text.partition("[calibration](evidence.md#")[2].partition(")")[0]
    heading = next(line for line in page.evidence(tmp_path).splitlines() if "how right" in line)
    assert heading.removeprefix("## ").lower().replace(" ", "-").replace("'", "").replace(":", "") == anchor
