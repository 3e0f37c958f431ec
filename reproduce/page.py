"""Write docs/how_good.md from the files in results/: every number there has its command, commit and machine.

python reproduce/page.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "how_good.md"
INTRODUCTION = """\
# How good is it?

Written by `python reproduce/page.py` from the files in [results/](../results/); do not edit it by hand. \
Methods run with untouched weights, but where training is said, at equal MACs on the same images \
(`diffrate compare`, `diffrate methods`). \
Differences are in points of top-1 and in mean negative log-likelihood, paired, with 95 % intervals from drawing \
images anew; p is McNemar's. How the search works and what was tried: [search.md](search.md).
"""
# What the paper has, the file here, and where its results lie: a table in reproduce_*.json, or files by their names.
EXPERIMENTS = (
    ("Table 1, off the shelf", "off_the_shelf.py", "off_the_shelf"),
    ("Table 2, with training, and from scratch", "with_training.py", "with_training_*"),
    ("Table 3, several constraints", "hardware_table.py", "hardware_*"),
    ("Ablation, sorting metric", "sorting_metric.py", "sorting_metric"),
    ("Ablation, compression module", "operation_order.py", "operation_order"),
    ("Ablation, number of images", "number_of_images.py", "number_of_images"),
    ("Ablation, optimisation time", "optimisation_time.py", "optimisation_time"),
    ("Figure, 10,000 random schedules", "schedule_comparison.py", "schedule_comparison"),
    ("Figure, schedule transfer", "transfer.py", "transfer"),
    ("Table, published schedules", "schedules_table.py", "schedules"),
    ("Overhead", "overhead.py", "overhead"),
    ("CAFormer-S36", "off_the_shelf.py --model caformer_s36", "reproduce_caformer*"),
    ("Segmentation", "`diffrate segment`", "segmentation_*"),
    ("beyond the paper: the operator's options", "improvements.py", "improvements"),
    ("beyond the paper: seeds of the search", "little_data.py", "search_vit_tiny_h200"),
    ("beyond the paper: milliseconds", "milliseconds.py", "milliseconds_*"),
    ("beyond the paper: speed", "speed.py", "speed_*"),
    ("beyond the paper: speed of training", "training_speed.py", "training_speed_*"),
)
NOT_HERE = """\
The paper's own models (DeiT, MAE, LV-ViT, CAFormer) on the whole of ImageNet were not run here, nor any training on \
it: the images and checkpoints are not here. The commands for them are in [reproduce/](../reproduce/README.md). \
What says "not run" needs a machine or data that it did not have yet.
"""


def page(results: Path = ROOT / "results") -> str:
    parts = [INTRODUCTION]
    for path in sorted(results.glob("*.json")):
        record = json.loads(path.read_text())
        if path.name.startswith("compare_"):
            parts += [heading(path, record), "\n".join(comparison(record["results"])) + "\n"]
        elif path.name.startswith("reproduce_"):
            parts += [heading(path, record), *tables(record["results"])]
        elif path.name.startswith("with_training_"):
            parts += ["\n".join(trainings(path, record)) + "\n"]
    return "\n".join([*parts, "\n".join(what_was_run(results)) + "\n", NOT_HERE])


def what_was_run(results: Path) -> Iterator[str]:
    """Every table and figure, and the files that have it."""
    yield "## What was run, and what was not\n"
    yield "| | file | results |"
    yield "|---|---|---|"
    for name, file, key in EXPERIMENTS:
        found = [f"[{path.name}](../results/{path.name})" + note for path, note in where(results, key)]
        yield f"| {name} | {file if file.startswith('`') else f'`{file}`'} | {', '.join(found) or 'not run'} |"


def where(results: Path, key: str) -> Iterator[tuple[Path, str]]:
    """The files that hold an experiment, and a note where time ended it."""
    for path in sorted(results.glob(f"{key}.json")):
        yield path, ""
    for path in sorted(results.glob("reproduce_*.json")):
        table = json.loads(path.read_text())["results"]["tables"].get(key)
        if table is not None:
            late = any("time" in str(row.get("left_out", "")) for row in table["rows"])
            yield path, " (in part)" if late or not table["rows"] else ""


def heading(path: Path, record: dict[str, Any]) -> str:
    results = record["results"]
    whole = results["uncompressed"]
    gmacs = whole.get("gmacs", results.get("gmacs"))
    note = f" {record['note']}" if record.get("note") else ""
    return (
        f"## {results['model']}, {whole['images']:,} images\n\n[{path.name}](../results/{path.name}): "
        f"`{record['command']}`, {record['device']}, commit {str(record['commit'])[:10]}, {record['date'][:10]}. "
        f"Uncompressed: {gmacs:.3f} GMACs, top-1 {whole['top1']:.2f}, loss {whole['loss']:.4f}.{note}\n"
    )


def comparison(results: dict[str, Any]) -> Iterator[str]:
    yield "| budget | method | GMACs | top-1 % | points | loss rise | points to the first method | p |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in results["rows"]:
        whole, first = row["to_uncompressed"], row["to_first"]
        name = row["method"] + (f" ({row['note']})" if row["note"] else "")
        cells = [f"{row['budget']:.3g}", name, f"{row['gmacs']:.3f}", f"{row['top1']:.2f}"]
        cells += [interval(whole["top1_difference"], whole["top1_interval"], 2)]
        cells += [interval(whole["loss_difference"], whole["loss_interval"], 3)]
        cells += ["", ""] if first is None else [
            interval(first["top1_difference"], first["top1_interval"], 2), f"{first['mcnemar_p']:.2g}"
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"
    for left_out in results["left_out"]:
        yield f"\nLeft out: {left_out}."


def trainings(path: Path, record: dict[str, Any]) -> Iterator[str]:
    """The mean accuracy of the runs of each kind at each budget."""
    results = record["results"]
    yield (
        f"## {results['model']}, with training, {results['test_images']:,} images\n\n"
        f"[{path.name}](../results/{path.name}): `{record['command']}`, {record['device']}, commit "
        f"{str(record['commit'])[:10]}, {record['date'][:10]}. Uncompressed: {results['gmacs']:.3f} GMACs, top-1 "
        f"{results['uncompressed']:.2f}.\n"
    )
    yield "| budget | | GMACs | top-1 % | runs | epochs |"
    yield "|---|---|---|---|---|---|"
    for budget, known in results["budgets"].items():
        yield f"| {budget} | searched, without tuning | {known['gmacs']:.3f} | {known['without tuning']:.2f} | | |"
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results["runs"]:
        kinds.setdefault((row["budget"], row["name"]), []).append(row)
    for (budget, name), rows in sorted(kinds.items(), key=lambda item: -item[1][0]["gmacs"]):
        mean = sum(row["test_accuracy"] for row in rows) / len(rows)
        epochs = f"{min(row['epochs'] for row in rows)} of {rows[0]['of_epochs']}"
        yield f"| {budget} | {name} | {rows[0]['gmacs']:.3f} | {mean:.2f} | {len(rows)} | {epochs} |"


def tables(results: dict[str, Any]) -> Iterator[str]:
    for table in results["tables"].values():
        measured = [row for row in table["rows"] if "points" in row]
        others = [row for row in table["rows"] if "points" not in row]
        yield f"### {table['title']}\n"
        if isinstance(table["paper"], str):
            yield f"The paper: {table['paper']}.\n"
        elif all(isinstance(value, float | int) for value in table["paper"].values()):
            numbers = ", ".join(f"{name} {value:g}" for name, value in table["paper"].items())
            yield f"The paper: {numbers}.\n"
        if measured:
            lines = ["| budget | | GMACs | top-1 % | points | loss rise |", "|---|---|---|---|---|---|"]
            for row in measured:
                cells = [f"{row['budget']:.3g}", row["name"], f"{row['gmacs']:.3f}", f"{row['top1']:.2f}"]
                cells += [interval(row["points"], row["points_interval"], 2)]
                cells += [interval(row["loss_rise"], row["loss_interval"], 3)]
                lines.append(f"| {' | '.join(cells)} |")
            yield "\n".join(lines) + "\n"
        for row in others:
            values = ", ".join(
                f"{key} {value}" for key, value in row.items() if key not in ("name", "settings")
            )
            yield f"- {row['name']}: {values}"
        if others:
            yield ""


def interval(value: float, ends: list[float], digits: int) -> str:
    return f"{value:+.{digits}f} [{ends[0]:+.{digits}f}, {ends[1]:+.{digits}f}]"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
