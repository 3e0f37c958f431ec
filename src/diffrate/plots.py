"""Plots, drawn without a display."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffrate.errors import DiffRateError
from diffrate.schedule import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from diffrate.compare import Compared, Row
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


def accuracy_plot(compared: Compared, path: Path) -> None:
    """Top-1 against GMACs, a line a method with 95 % intervals of the difference, and against speed where timed."""
    from matplotlib.figure import Figure

    def place(of: Compared | Row, by_cost: bool) -> float:
        return of.gmacs if by_cost or of.speed is None else of.speed.images_per_second

    whole, timed = compared.whole, compared.speed is not None
    figure = Figure(figsize=(12 if timed else 6.5, 4.5), layout="constrained")
    panels = figure.subplots(1, 1 + timed, squeeze=False)[0]
    for axes, x in zip(panels, ("GMACs", "images per second"), strict=False):
        by_cost = x == "GMACs"
        for method in dict.fromkeys(row.method for row in compared.rows):
            rows = [row for row in compared.rows if row.method == method]
            at = [place(row, by_cost) for row in rows]
            top1 = [row.evaluation.top1 for row in rows]
            low = [row.to_whole.top1_difference - row.to_whole.top1_interval[0] for row in rows]
            high = [row.to_whole.top1_interval[1] - row.to_whole.top1_difference for row in rows]
            spread = [[max(0.0, end) for end in ends] for ends in (low, high)]
            axes.errorbar(
                at, top1, yerr=spread, marker="o", markersize=4, capsize=3, linewidth=1, label=method
            )
        axes.plot(
            place(compared, by_cost),
            whole.top1,
            "k*",
            markersize=11,
            label="uncompressed",
        )
        axes.axhline(whole.top1, color="black", linewidth=0.5, linestyle=":")
        axes.set(xlabel=x, ylabel="top-1 %")
    panels[0].legend(fontsize=8)
    _save(figure, path)


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
