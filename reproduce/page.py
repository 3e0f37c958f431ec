"""Write docs/how_good.md and docs/evidence.md from the files in results/: what came out, and all of its tables.

    python reproduce/page.py
    python reproduce/page.py --check    # exits with 1 where that would change a page

Every number has its command, commit and machine. Tables of methods come from compare_*.json, those of the paper from
reproduce_*.json and with_training_*.json, and what was run at all from what_was_run.py. Seconds; nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import in_short
import markdown_table
import paper_tables
import what_was_run

from diffrate.comparison_table import operators
from diffrate.methods.fit import off_budget
from diffrate.operator import Operator
from diffrate.plots import accuracy_plot

ROOT = Path(__file__).resolve().parents[1]
PAGE, EVIDENCE = ROOT / "docs" / "how_good.md", ROOT / "docs" / "evidence.md"
INTRODUCTION = """\
# How good is it?

Written by `python reproduce/page.py` from the files in [results/](../results/); do not edit it by hand. \
Every table and figure of the paper, with intervals and commands: [the evidence](evidence.md). \
Methods run with untouched weights, but where training is said, at equal MACs on the same images \
(`diffrate compare`, `diffrate methods`); a row that is more than 1 % off its budget says so, and ATS, which keeps \
another number of tokens of each image, what it costs in batches. \
Differences are in points of top-1 and in mean negative log-likelihood, paired, with 95 % intervals from drawing \
images anew; p is McNemar's. A search is that of the commit which its file names; how searches work, what was tried \
and what has changed since: [search.md](search.md).
"""
TABLES = """\
# The evidence

Every table and figure of the paper, and what goes beyond it, as it was measured here; written by \
`python reproduce/page.py` from the files in [results/](../results/), which have more. What it comes to, and what was \
not run: [how good is it?](how_good.md)
"""
NOT_HERE = """\
"In part" is said of a file without all rows that the experiment has today, at three budgets where it takes several. \
The paper's own models (DeiT, MAE, LV-ViT, CAFormer) on the whole of ImageNet were not run here, nor any training on \
it: the images and checkpoints are not here. The commands for them are in [reproduce/](../reproduce/README.md).
"""


def page(results: Path = ROOT / "results") -> str:
    """What came out, in short, and what was run."""
    run = "\n".join(what_was_run.lines(results)) + "\n"
    return "\n".join([INTRODUCTION, *in_short.lines(records_in(results), with_table), run, NOT_HERE])


def evidence(results: Path = ROOT / "results") -> str:
    """All tables."""
    return "\n".join([TABLES, *sections(records_in(results)), "\n".join(of_the_paper()) + "\n"])


Records = dict[Path, dict[str, Any]]


def records_in(results: Path) -> Records:
    return {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))}


def sections(records: Records) -> Iterator[str]:
    """The paper's tables and figures in its order, each with the paper's numbers and what was measured here."""
    for each in what_was_run.EXPERIMENTS:
        trained = {path: record for path, record in records.items() if path.match(f"{each.key}.json")}
        if each.key.startswith("with_training") and trained:
            yield f"## {each.name[0].upper()}{each.name[1:]}\n"
            for path, record in trained.items():
                yield "\n".join(trainings(path, record)) + "\n"
        found = with_table(records, each.key)
        if found:
            yield f"## {each.name[0].upper()}{each.name[1:]}\n"
            if each.remark:
                yield f"{each.remark}\n"
            yield from paper(found[0][1]["results"]["tables"][each.key]["paper"])
        for path, record in found:
            yield heading(path, record)
            yield from rows_of(record["results"]["tables"][each.key])
    compared = {path: record for path, record in records.items() if path.name.startswith("compare_")}
    if compared:
        yield "## By `diffrate compare`\n"
    for path, record in compared.items():
        yield heading(path, record)
        yield "\n".join(comparison(record["results"])) + "\n"


def with_table(records: Records, key: str) -> list[tuple[Path, dict[str, Any]]]:
    """The files that have a table; those of the embedded model come last."""
    found = [
        (p, r)
        for p, r in records.items()
        if p.name.startswith("reproduce_") and key in r["results"]["tables"]
    ]
    return sorted(found, key=lambda item: item[1]["results"].get("model") == "embedded")


def origin(path: Path, record: dict[str, Any]) -> str:
    return (
        f"[{path.name}](../results/{path.name}): `{record['command']}`, {record['device']}, "
        f"commit {str(record['commit'])[:10]}, {record['date'][:10]}."
    )


def heading(path: Path, record: dict[str, Any]) -> str:
    results, note = record["results"], f" {record['note']}" if record.get("note") else ""
    whole = results.get("uncompressed")
    if whole is None:
        return f"{origin(path, record)}{note}\n"
    gmacs = whole.get("gmacs", results.get("gmacs"))
    return (
        f"### {results['model']}, {whole['images']:,} images\n\n{origin(path, record)} Uncompressed: "
        f"{gmacs:.3f} GMACs, top-1 {whole['top1']:.2f}, loss {whole['loss']:.4f}.{note}\n"
    )


def comparison(results: dict[str, Any]) -> Iterator[str]:
    timed = any(row.get("speed") for row in results["rows"])
    header = [
        "budget",
        "method",
        "GMACs",
        "top-1 %",
        "points",
        "loss rise",
        "points to the first method",
        "p",
    ]
    rows = []
    for row in results["rows"]:
        whole, first, speed = row["to_uncompressed"], row["to_first"], row.get("speed")
        cells = [f"{row['budget']:.3g}", with_note(row["method"], row["note"])]
        cells += [f"{row['gmacs']:.3f}", f"{row['top1']:.2f}"]
        cells += [interval(whole["top1_difference"], whole["top1_interval"], 2)]
        cells += [interval(whole["loss_difference"], whole["loss_interval"], 3)]
        cells += ["", ""] if first is None else [
            interval(first["top1_difference"], first["top1_interval"], 2), f"{first['mcnemar_p']:.2g}"
        ]  # fmt: skip
        cells += [f"{speed['images_per_second']:,.0f}", f"{speed['of_uncompressed']:.2f}"] if speed else []
        rows.append(cells + [""] * 2 * (timed and not speed))
    yield from markdown_table.lines(header + ["images/s", "of uncompressed"] * timed, rows)
    for line in operators(results["rows"]):
        yield f"\nThe {line}."
    for left_out in results["left_out"]:
        yield f"\nLeft out: {left_out}."


def trainings(path: Path, record: dict[str, Any]) -> Iterator[str]:
    """The mean accuracy of the runs of each kind at each budget."""
    results = record["results"]
    yield (
        f"### {results['model']}, {results['test_images']:,} images\n\n{origin(path, record)} "
        f"Uncompressed: {results['gmacs']:.3f} GMACs, top-1 {results['uncompressed']:.2f}."
        + (f" {record['note']}" if record.get("note") else "")
        + "\n"
    )
    yield from paper(results["paper"])
    rows = [
        [
            budget,
            "searched, without tuning",
            f"{known['gmacs']:.3f}",
            f"{known['without tuning']:.2f}",
            "",
            "",
        ]
        for budget, known in results["budgets"].items()
    ]
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in results["runs"]:
        kinds.setdefault((run["budget"], run["name"]), []).append(run)
    for (budget, name), runs in sorted(kinds.items(), key=lambda item: -item[1][0]["gmacs"]):
        mean = sum(run["test_accuracy"] for run in runs) / len(runs)
        epochs = f"{min(run['epochs'] for run in runs)} of {runs[0]['of_epochs']}"
        padded = f"{runs[0]['padded_gmacs']:.3f} in batches" if "padded_gmacs" in runs[0] else ""
        gmacs = with_note(f"{runs[0]['gmacs']:.3f}", padded)
        rows.append([budget, name, gmacs, f"{mean:.2f}", str(len(runs)), epochs])
    yield from markdown_table.lines(("budget", "", "GMACs", "top-1 %", "runs", "epochs"), rows)
    for left_out in results.get("left_out", []):
        yield f"\nLeft out: {left_out}."


def rows_of(table: dict[str, Any]) -> Iterator[str]:
    """What a table has: measured rows, races, reasons why rows are missing, and rows of other kinds."""
    measured = [row for row in table["rows"] if "points" in row and "target_ms" not in row]
    at_equal_time = [row for row in table["rows"] if "target_ms" in row]
    raced = [row for row in table["rows"] if "better" in row]
    left_out = [row for row in table["rows"] if "left_out" in row]
    if measured:
        yield "\n".join(measurements(measured)) + "\n"
    if at_equal_time:
        yield "\n".join(timings(at_equal_time)) + "\n"
    if raced:
        yield "\n".join(races(raced)) + "\n"
    if left_out:
        yield "\n".join(reasons(left_out)) + "\n"
    others = [
        {key: value for key, value in row.items() if key != "settings"}
        for row in table["rows"]
        if not row.keys() & {"points", "better", "left_out"}
    ]
    for keys in dict.fromkeys(tuple(row) for row in others):
        header = ["" if key == "name" else key.replace("_", " ") for key in keys]
        alike = [[shown(row[key]) for key in keys] for row in others if tuple(row) == keys]
        yield "\n".join(markdown_table.lines(header, alike)) + "\n"


def measurements(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Rows with an accuracy; where they are known the operator, how they differ from the search, and its seconds."""
    keys = ("operator", "to_search", "search_seconds")
    named, paired, timed = (any(key in row for row in rows) for key in keys)
    header = ["budget", "", *["operator"] * named, "GMACs", "top-1 %", "points", "loss rise"]
    header += ["points to the search", "loss to the search", "p"] * paired + ["s"] * timed
    lines = []
    for row in rows:
        cells = [f"{row['budget']:.3g}", with_note(row["name"], cost_note(row))]
        cells += [row.get("operator") or operator_of(row)] * named
        cells += effects(row)
        cells += [""] * (len(header) - timed - len(cells))
        lines.append(cells + [f"{row['search_seconds']:.0f}" if "search_seconds" in row else ""] * timed)
    yield from markdown_table.lines(header, lines)


def timings(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Rows that were made for a time, and how they differ from the first one for the same."""
    header = (
        "for", "", "ms", "times as fast", "GMACs", "top-1 %", "points", "loss rise", "points to the first",
        "loss to the first", "p",
    )  # fmt: skip
    lines = []
    for row in rows:
        cells = [f"{row['target_ms']:.2f} ms", row["name"], f"{row['ms']:.2f}", f"{row['speed']:.2f}"]
        cells += effects(row)
        lines.append(cells + [""] * (len(header) - len(cells)))
    yield from markdown_table.lines(header, lines)


def effects(row: dict[str, Any]) -> Iterator[str]:
    """What a row costs, how right it is, its difference to the whole model and, if it has one, to the search."""
    yield from (f"{row['gmacs']:.3f}", f"{row['top1']:.2f}")
    yield interval(row["points"], row["points_interval"], 2)
    yield interval(row["loss_rise"], row["loss_interval"], 3)
    if to := row.get("to_search"):
        yield interval(to["points"], to["points_interval"], 2)
        yield interval(to["loss_difference"], to["loss_interval"], 3)
        yield f"{to['mcnemar_p']:.2g}"


def operator_of(row: dict[str, Any]) -> str:
    """That of a schedule, in words; other methods have none."""
    schedule = row.get("settings", {}).get("schedule")
    return Operator.from_dict(schedule["operator"]).in_words() if schedule else ""


def cost_note(row: dict[str, Any]) -> str:
    """Where a row is not at equal MACs, and what batches of images that keep different numbers of tokens cost."""
    said = [off_budget(row["gmacs"], row["budget"])]
    if "padded_gmacs" in row:
        said.append(f"padded to {row['padded_gmacs']:.3f} GMACs in these batches")
    if "measured" in row:
        said.append(f"measured later: {row['measured']}")
    return "; ".join(filter(None, said))


def races(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """How many random schedules are better than each searched one, by each measure; then how their races went.

    Of those that left early some were looked at again, which says how many are better at most, with 95 % confidence.
    """
    header = (
        "budget", "", "by", "its own", "random ones that are better", "of", "%", "in both halves of the images",
        "of those that left early, better", "so more, at most",
    )  # fmt: skip
    cells = [
        [
            f"{row['budget']:.3g}", row["search"], row["name"].removeprefix("the race by "),
            f"{row['own']:.4f}" if "own" in row else "", f"{row['better']:,}", f"{row['schedules']:,}",
            f"{row['rank_percent']:.2f}",
            f"{row['better_in_both_halves']:,}" if "better_in_both_halves" in row else "",
            f"{row['audited_better']:,} of {row['audited']:,}",
            f"{row['most_missed']:,}",
        ]
        for row in rows
    ]  # fmt: skip
    yield from markdown_table.lines(header, cells)
    for course in dict.fromkeys(map(went, rows)):
        yield f"\n{course}"


def went(row: dict[str, Any]) -> str:
    """How far a race went, in words."""
    parts = [f"{some:,} saw {images:,}" for some, images in zip(row["entered"], row["images"], strict=True)]
    early = "" if row["complete"] else " Time ended it before the last image."
    if row.get("both_views", False):
        early += (
            " An image counts by the mean of it and its mirror image here, and as it is in the rows above."
        )
    where = f"Schedules and images at {row['budget']:.3g} GMACs"
    return f"{where}: {', '.join(parts)}. {row['seconds']:.0f} s, {row['runners']} processes.{early}"


def reasons(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What was left out and why, each reason once."""
    budgets: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        at = budgets.setdefault((row["name"], row["left_out"]), [])
        at += [f"{row['budget']:.3g}"] if "budget" in row else []
    for (name, reason), at in budgets.items():
        where = f" at {', '.join(at)} GMACs" if at else ""
        yield f"- Left out: {name}{where}: {reason}."


def paper(numbers: Any) -> Iterator[str]:
    """The paper's numbers: a sentence, a list, or a list for each of its models."""
    if isinstance(numbers, dict) and any(isinstance(value, dict) for value in numbers.values()):
        yield "The paper, on ImageNet-1k:\n"
        yield "\n".join(f"- {name}: {shown(value)}" for name, value in numbers.items()) + "\n"
    elif isinstance(numbers, dict):
        yield f"The paper has {shown(numbers)}.\n"
    else:
        yield f"The paper: {numbers}.\n"


def of_the_paper() -> Iterator[str]:
    """The paper's tables that nothing here can be held against yet."""
    yield "## The paper's tables of all budgets\n"
    yield "Its own numbers, top-1 on ImageNet-1k (`reproduce/paper_tables.py`); none of it was run here.\n"
    rows = []
    for model, ((gmacs, top1), budgets) in paper_tables.ALL_BUDGETS.items():
        rows.append([model, f"{gmacs:g}", f"{top1:.2f}, uncompressed", ""])
        rows += [
            [model, f"{at:g}", f"{off_the_shelf:.2f}", "" if tuned is None else f"{tuned:.2f}"]
            for at, off_the_shelf, tuned in budgets
        ]
    yield from markdown_table.lines(("", "GMACs", "off the shelf", "tuned"), rows)
    yield f"\nTrained from scratch: {shown(paper_tables.FROM_SCRATCH)}."
    both = (f"{name} {miou:.2f} at {g:g} GMACs" for name, (g, miou, _) in paper_tables.SEGMENTATION.items())
    yield f"\nSegmentation of ADE20k by Semantic FPN, mIoU: {', '.join(both)}."


def shown(value: Any) -> str:
    """Numbers of the paper or of a row; two together are GMACs and top-1."""
    if isinstance(value, dict):
        return "; ".join(f"{name}: {shown(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        if all(isinstance(each, float | int) for each in value):
            return f"{value[1]:g} at {value[0]:g} G" if len(value) == 2 else ", ".join(map(shown, value))
        return " and ".join(map(shown, value))
    if isinstance(value, float | int) and abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def with_note(name: str, note: str) -> str:
    return f"{name} ({note})" if note else name


def interval(value: float, ends: Sequence[float], digits: int) -> str:
    return f"{value:+.{digits}f} [{ends[0]:+.{digits}f}, {ends[1]:+.{digits}f}]"


def draw(results: Path = ROOT / "results") -> None:
    """A plot beside every comparison that was timed on a GPU."""
    for path, record in in_short.timed_on_gpu(records_in(results)).items():
        compared = record["results"]
        title = f"{compared['model']}, {compared['uncompressed']['images']:,} images"
        accuracy_plot(compared, path.with_suffix(".png"), title)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--check", action="store_true", help="write nothing")
    pages = {PAGE: page, EVIDENCE: evidence}
    if flags.parse_args().check:
        stale = [file.name for file, text in pages.items() if file.read_text(encoding="utf-8") != text()]
        sys.exit(f"stale: {', '.join(stale)}" if stale else 0)
    draw()
    for file, text in pages.items():
        file.write_text(text(), encoding="utf-8")
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
