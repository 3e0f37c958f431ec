"""Plots, drawn without a display."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffrate.costs.gemmini import Design, Workload
    from diffrate.schedule import Schedule
    from diffrate.searching.budget import Budget


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
    figure.savefig(path, dpi=120)


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
    figure.savefig(path, dpi=120)
