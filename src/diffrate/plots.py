"""Plots, drawn without a display."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffrate.errors import DiffRateError
from diffrate.schedule import write_bytes
from diffrate.speed import UNCOMPRESSED, WITH_KERNELS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from diffrate.costs.gemmini import Design, Workload
    from diffrate.schedule import Schedule
    from diffrate.searching.budget import Budget


def check_format(path: Path) -> None:
    """Raise where the name ends in nothing that a plot could be written as."""
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.lower().lstrip(".") not in known:
        raise DiffRateError(f"a plot is written as {', '.join(sorted(known))}, which {path} does not end in")


def _save(figure: Figure, path: Path) -> None:
    """Whole or not at all, like every other file."""
    check_format(path)
    figure.savefig(content := io.BytesIO(), format=path.suffix.lower().lstrip("."), dpi=120)
    write_bytes(path, content.getvalue())


def kept_plot(history: list[dict[str, Any]], path: Path) -> None:
    """Kept tokens per block in the course of a search, early steps light, late ones dark, a panel for each budget."""
    from matplotlib.figure import Figure

    budgets = list(dict.fromkeys(entry["budget"] for entry in history))
    figure = Figure(figsize=(5 * max(len(budgets), 1), 4), layout="constrained")
    for axes, budget in zip(
        figure.subplots(1, max(len(budgets), 1), squeeze=False)[0], budgets, strict=False
    ):
        entries = [entry for entry in history if entry["budget"] == budget]
        for i in range(0, len(entries), max(1, len(entries) // 30)):
            shade = 0.1 + 0.5 * i / max(len(entries) - 1, 1)
            axes.plot(entries[i]["kept"], color="tab:blue", alpha=shade, linewidth=0.8)
        axes.plot(entries[-1]["kept"], color="tab:red", marker="o", markersize=3, label="last step")
        axes.set(title=budget, xlabel="block", ylabel="tokens kept", ylim=(0, None))
        axes.legend()
    _save(figure, path)


def speed_plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Images per second against accuracy, for the rows that have one; a line for each model, mode and batch size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    known = [row for row in rows if row.get("accuracy") is not None]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in known:
        groups.setdefault(f"{row['model']}, {row['mode']}, batch {row['batch_size']}", []).append(row)
    for label, group in groups.items():
        group.sort(key=lambda row: row["images_per_second"])
        speeds = [row["images_per_second"] for row in group]
        accuracies = [row["accuracy"] for row in group]
        axes.plot(speeds, accuracies, marker="o", label=label)
        for row in group:
            where = (row["images_per_second"], row["accuracy"])
            axes.annotate(row["name"], where, xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.set(xlabel="images/s", ylabel="top-1 %", title="throughput against accuracy")
    axes.legend(fontsize=7)
    _save(figure, path)


MARKERS = "osD^vP"  # one for each round of the colours
COLOURS = [*(f"C{i}" for i in range(10)), "black", "darkblue", "saddlebrown", "lime"]


def accuracy_plot(results: Mapping[str, Any], path: Path, title: str = "") -> None:
    """Top-1 against GMACs, a line a method with 95 % intervals of the difference, and against speed where timed.

    results  as `Compared.to_dict` has them, and a file of results.
    """
    _save(accuracy_figure(results, title), path)


def accuracy_figure(results: Mapping[str, Any], title: str = "") -> Figure:
    from matplotlib.figure import Figure

    whole, rows = results["uncompressed"], results["rows"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    closest = min(row["gmacs"] for row in rows) / 150  # between two methods at one budget
    timed = whole.get("speed") is not None
    figure = Figure(figsize=(13 if timed else 7.5, 5), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    panels = figure.subplots(1, 1 + timed, squeeze=False)[0]
    for axes, x in zip(panels, ("GMACs", "images per second"), strict=False):
        by_cost = x == "GMACs"
        for i, method in enumerate(methods):
            its = [row for row in rows if row["method"] == method]
            # Side by side, where all have the same cost: intervals would hide each other.
            aside = (i - (len(methods) - 1) / 2) * closest if by_cost else 0.0
            at = [_place(row, by_cost) + aside for row in its]
            differences = [(row["to_uncompressed"], row["to_uncompressed"]["top1_interval"]) for row in its]
            low = [each["top1_difference"] - ends[0] for each, ends in differences]
            high = [ends[1] - each["top1_difference"] for each, ends in differences]
            axes.errorbar(
                at,
                [row["top1"] for row in its],
                yerr=[[max(0.0, end) for end in ends] for ends in (low, high)],
                color=COLOURS[i % len(COLOURS)],
                marker=MARKERS[i % len(MARKERS)],
                markersize=4 if i else 6,
                linewidth=1 if i else 2.5,  # the first is what others are held against
                elinewidth=0.5,
                capsize=2,
                label=method,
            )
        axes.plot(_place(whole, by_cost), whole["top1"], "k*", markersize=11, label=UNCOMPRESSED)
        if not by_cost and (beside := whole.get("speed_with_kernels")):
            place = beside["images_per_second"], whole["top1"]
            axes.plot(*place, "k*", markersize=11, markerfacecolor="none", label=WITH_KERNELS)
        axes.axhline(whole["top1"], color="black", linewidth=0.5, linestyle=":")
        axes.set(xlabel=x + (", methods of one budget set side by side" if by_cost else ""), ylabel="top-1 %")
    panels[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _place(of: Mapping[str, Any], by_cost: bool) -> float:
    return float(of["gmacs"] if by_cost else of["speed"]["images_per_second"])


def design_plot(workload: Workload, schedule: Schedule, chosen: Design, target: Budget, path: Path) -> None:
    """Latency and power of a schedule on every design that can be built, by array size, and the chosen design."""
    from matplotlib.figure import Figure

    from diffrate.costs.gemmini import buildable_designs

    designs = buildable_designs()
    kept = [float(n) for n in schedule.effective.merge]
    prices, own = workload.price(designs, kept), workload.price(chosen.row()[None], kept)
    sides = designs[:, 0] * designs[:, 2]
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for side in sides.unique().tolist():
        mine = sides == side
        latency, power = prices["latency_ms"][mine], prices["power_at_rate_mw"][mine]
        axes.scatter(latency, power, s=4, label=f"{side:.0f}x{side:.0f}")
    axes.scatter(own["latency_ms"], own["power_at_rate_mw"], marker="*", s=120, color="black", label="chosen")
    if "latency_ms" in target.targets:
        axes.axvline(target.targets["latency_ms"], color="grey", linestyle=":")
    if "power_at_rate_mw" in target.targets:
        axes.axhline(target.targets["power_at_rate_mw"], color="grey", linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="latency, ms", ylabel="power at the given rate, mW")
    axes.set_title(f"{len(designs):,} designs; dotted: targets {target}", fontsize="medium")
    axes.legend(fontsize="small")
    _save(figure, path)
