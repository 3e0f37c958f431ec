"""Plots, drawn without a display."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
