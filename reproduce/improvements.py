"""What the paper's operator gains from each idea, alone and together, at fixed counts: those published for this shape.

The paper's operator prunes, then merges, into plain means, by class attention. Each row changes one thing in it, or
combines several; weights and counts stay. What `--recipe fast` searches with is among them, and what it could gain
from one more option.

Cost: 19 passes over the validation images for each budget; no search.

Measured here: results/reproduce_vit_tiny_improvements_h200.json, ViT-Ti at 0.655 GMACs: the loss rises by 0.110 under
the paper's operator and by 0.045 under fast's default. The embedded model:
results/reproduce_embedded_improvements_h200.json. At ViT-Ti, in one command:

    python reproduce/improvements.py --model vit_tiny_patch16_224 --checkpoint vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet --crop-pct 1.0 --budgets 1.0G,0.81G,0.655G \\
        --json results/reproduce_vit_tiny_improvements_h200.json
"""

from __future__ import annotations

from typing import Any

from setting import Setting, Table, main

import diffrate
from diffrate.evaluate import compare_evaluations
from diffrate.methods.schedules import published_schedule
from diffrate.operator import Operator
from diffrate.searching import fast

PAPER = "pruning, then merging, was best of four orders on DeiT-B at 11.5 GMACs (81.50); the rest is not in the paper"
MERGE = {"operation": "merge"}
WEIGHTED = {**MERGE, "mean": "attention"}
BY_COST = {**WEIGHTED, "choice": "cost"}
KEPT = {**BY_COST, "keep_norm": True}
DEFAULT = "the same, norm-preserving merges (fast's default)"
VARIANTS: dict[str, dict[str, Any]] = {
    "the paper's operator": {},
    "importance: class attention x |V|": {"importance": "class-attention-value"},
    "mass of pruned tokens": {"pruned_mass": True},
    "size-weighted means": {"mean": "size"},
    "class-attention-weighted means": {"mean": "attention"},
    "size-aware matching": {"size_aware": True},
    "norm-preserving merges": {"keep_norm": True},
    "merging only": MERGE,
    "merging only, size-weighted means": {**MERGE, "mean": "size"},
    "merging only, attention-weighted means": WEIGHTED,
    "merging only, attention-weighted means, size-aware matching": {**WEIGHTED, "size_aware": True},
    "merging only, attention-weighted means, norm-preserving merges": {**WEIGHTED, "keep_norm": True},
    "merging only, attention-weighted means, tokens by cost": BY_COST,
    DEFAULT: KEPT,
    "fast's default, plain means": {**KEPT, "mean": "plain"},
    "fast's default, pruning first": {**KEPT, "operation": "prune-merge"},
    "fast's default, class attention x |V|": {**KEPT, "importance": "class-attention-value"},
    "fast's default, size-aware matching": {**KEPT, "size_aware": True},
    "fast's default, 30 % of the importance from before": {**KEPT, "memory": 0.3},
}


def run(setting: Setting) -> None:
    table = Table(setting, "improvements", "Improvements on the paper's operator", PAPER)
    assert Operator(**VARIANTS[DEFAULT]) == fast.OPERATOR
    for budget in setting.budgets:
        schedule, first = published_schedule(setting.model, budget), None
        for name, changes in VARIANTS.items():
            model = diffrate.compress(setting.model, schedule, **changes)
            result = table.measure(name, model, budget=budget)
            first = first or result
            c = compare_evaluations(result, first)
            table.rows[-1] |= {
                "loss_to_the_papers": c.loss_difference,
                "loss_to_the_papers_interval": c.loss_interval,
                "points_to_the_papers": c.top1_difference,
            }
    wins(table, setting.budgets)


def wins(table: Table, budgets: list[float]) -> None:
    """At how many budgets each variant has the lowest loss, and at how many less than the paper's operator."""
    for name in VARIANTS:
        rows = [row for row in table.rows if row["name"] == name and "loss_rise" in row]
        best = sum(row["loss_rise"] == min(_rises(table, row["budget"])) for row in rows)
        ahead = sum(row["loss_to_the_papers_interval"][1] < 0 for row in rows)
        table.add(f"budgets of {len(budgets)}: {name}", lowest_loss=best, surely_below_the_paper=ahead)


def _rises(table: Table, budget: float) -> list[float]:
    return [row["loss_rise"] for row in table.rows if row.get("budget") == budget and "loss_rise" in row]


if __name__ == "__main__":
    main(__doc__, run)
