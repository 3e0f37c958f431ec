"""A comparison as people and programs read it: a table for the terminal, Markdown, CSV, and what stands below them.

Differences have their 95 % intervals beside them; p is McNemar's, against the first row of the budget, which the
column names where all budgets have the same.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from diffrate.compare import NUMBERS, Compared
from diffrate.operator import Operator
from diffrate.speed import UNCOMPRESSED, WITH_KERNELS, Speed

SPEEDS = ("images_per_second", "of_uncompressed", "ms", "spread_ms")
COLUMNS = ("budget", "method", "GMACs", "top-1 %", "points to whole", "loss rise")


def table(compared: Compared) -> tuple[list[str], list[list[str]]]:
    """Columns and cells for people: differences with their 95 % intervals, and McNemar's p against the first row."""
    timed = compared.speed is not None
    whole = compared.whole
    cells = [["", UNCOMPRESSED, f"{compared.gmacs:.3f}", f"{whole.top1:.2f}", "", "", "", ""]]
    cells[0] += _speed_cells(compared.speed)
    for row in compared.rows:
        first = row.to_first
        cells.append(
            [
                f"{row.budget:.3g}",
                row.method + (f" ({row.note})" if row.note else ""),
                f"{row.gmacs:.3f}",
                f"{row.evaluation.top1:.2f}",
                _interval(row.to_whole.top1_difference, row.to_whole.top1_interval, 2),
                _interval(row.to_whole.loss_difference, row.to_whole.loss_interval, 3),
                "" if first is None else _interval(first.top1_difference, first.top1_interval, 2),
                "" if first is None else f"{first.mcnemar_p:.2g}",
                *_speed_cells(row.speed),
            ]
        )
    names = list(firsts(compared))
    to = names[0] if len(names) == 1 else "first"
    return [*COLUMNS, f"points to {to}", "p", *(("images/s", "x whole") if timed else ())], cells


def firsts(compared: Compared) -> dict[str, list[float]]:
    """The rows that the others of their budget are compared with, by name, and the budgets of each."""
    found: dict[str, list[float]] = {}
    for row in compared.rows:
        if row.to_first is None:
            found.setdefault(row.method, []).append(row.budget)
    return found


def remarks(compared: Compared) -> list[str]:
    """What stands below a table: with which rows others were compared, and under which operators schedules ran."""
    several = [
        f"{name} at {', '.join(f'{budget:.3g}' for budget in budgets)} GMACs"
        for name, budgets in firsts(compared).items()
    ]
    said = [f"compared with the first row of each budget: {'; '.join(several)}"] if len(several) > 1 else []
    return [*said, *operators(compared.to_dict()["rows"])]


def _speed_cells(speed: Speed | None) -> list[str]:
    return [] if speed is None else [f"{speed.images_per_second:.1f}", f"{speed.of_uncompressed:.2f}"]


def speed_line(compared: Compared) -> str:
    """How the speeds were measured, to stand behind what else is said of a comparison."""
    speed, other = compared.speed, compared.with_kernels
    if speed is None:
        return ""
    said = f"; speed: {speed.mode}, {speed.dtype}, {speed.batch_size} images a batch"
    if other is not None:
        said += f"; {WITH_KERNELS}: {other.of_uncompressed:.2f} x whole"
    return said


def operators(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Under which operators the schedules ran, where that is more than one: their rows differ in more than counts.

    rows  as `Compared.to_dict` has them.
    """
    under: dict[str, dict[str, None]] = {}
    for row in rows:
        if "operator" in row["settings"]:
            words = Operator.from_dict(row["settings"]["operator"]).in_words()
            under.setdefault(words, {})[row["method"]] = None
    return (
        [f"operator of {', '.join(names)}: {words}" for words, names in under.items()]
        if len(under) > 1
        else []
    )


def markdown(compared: Compared, title: str = "", origin: str = "") -> str:
    """The table with what is needed to hand it on; `origin` says what made it."""
    columns, cells = table(compared)
    lines = [columns, ["---"] * len(columns), *cells]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    rows = "\n".join(f"| {' | '.join(line)} |" for line in escaped)
    left_out = [f"left out: {reason}" for reason in compared.left_out]
    parts = [f"# {title}"] * bool(title) + [rows, *left_out, *remarks(compared)] + [origin] * bool(origin)
    return "\n\n".join(parts) + "\n"


def as_csv(compared: Compared) -> str:
    """One line a row with plain numbers, for spreadsheets."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    differences = ("top1_difference", "top1_interval", "loss_difference", "loss_interval", "mcnemar_p")
    sides = ("to_uncompressed", "to_first")
    names = [
        f"{side}_{name}{end}"
        for side, name in itertools.product(sides, differences)
        for end in (("_low", "_high") if name.endswith("interval") else ("",))
    ]
    writer.writerow(["method", "budget", "gmacs", *NUMBERS, *SPEEDS, *names, "note"])
    blank: list[Any] = [""] * len(names)
    whole = compared.to_dict()[UNCOMPRESSED]
    writer.writerow([UNCOMPRESSED, "", compared.gmacs, *_plain(whole), *blank, ""])
    for row in compared.rows:
        values = row.to_dict()
        cells: list[Any] = []
        for side, name in itertools.product(sides, differences):
            value = "" if values[side] is None else values[side][name]
            cells += (list(value) or ["", ""]) if name.endswith("interval") else [value]
        writer.writerow([row.method, row.budget, row.gmacs, *_plain(values), *cells, row.note])
    return text.getvalue()


def _plain(values: Mapping[str, Any]) -> list[Any]:
    """The numbers of a row, and of its speed where it was timed."""
    speed = values["speed"] or dict.fromkeys(SPEEDS, "")
    return [*(values[name] for name in NUMBERS), *(speed[name] for name in SPEEDS)]


def _interval(value: float, ends: tuple[float, float], digits: int) -> str:
    return f"{value:+.{digits}f} [{ends[0]:+.{digits}f}, {ends[1]:+.{digits}f}]"
