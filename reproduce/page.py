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
Methods run with untouched weights at equal MACs on the same images (`diffrate compare`, `diffrate methods`). \
Differences are in points of top-1 and in mean negative log-likelihood, paired, with 95 % intervals from drawing \
images anew; p is McNemar's. How the search works and what was tried: [search.md](search.md).
"""
NOT_RUN = """\
## What was not run

The paper's own models (DeiT, MAE, LV-ViT, CAFormer) on the whole of ImageNet, anything with training (fine-tuning, \
training from scratch, DynamicViT, Evo-ViT, SPViT), several constraints at once, and segmentation. `reproduce/` has \
the commands for what needs only ImageNet and checkpoints.
"""


def page(results: Path = ROOT / "results") -> str:
    parts = [INTRODUCTION]
    for path in sorted(results.glob("*.json")):
        record = json.loads(path.read_text())
        if path.name.startswith("compare_"):
            parts += [heading(path, record), "\n".join(comparison(record["results"])) + "\n"]
        elif path.name.startswith("reproduce_"):
            parts += [heading(path, record), *tables(record["results"])]
    return "\n".join([*parts, NOT_RUN])


def heading(path: Path, record: dict[str, Any]) -> str:
    results = record["results"]
    whole = results["uncompressed"]
    gmacs = whole.get("gmacs", results.get("gmacs"))
    return (
        f"## {results['model']}, {whole['images']:,} images\n\n[{path.name}](../results/{path.name}): "
        f"`{record['command']}`, {record['device']}, commit {str(record['commit'])[:10]}, {record['date'][:10]}. "
        f"Uncompressed: {gmacs:.3f} GMACs, top-1 {whole['top1']:.2f}, loss {whole['loss']:.4f}.\n"
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
