"""Ablation (b): pruning, merging, and both in either order, with the paper's counts. DeiT-B at 11.5 GMACs there.

The paper searches counts for each; here they are the published ones of pruning, then merging. Below it, the choices
that this package adds to the operator: what a merged token becomes and which tokens are merged.

Cost: eight passes over the validation images for each budget; no search.

    python reproduce/operation_order.py --json results/operation_order_embedded.json
"""

from __future__ import annotations

from setting import Setting, Table, main

import diffrate
from diffrate.methods.schedules import published_schedule

PAPER = {"prune": 80.83, "merge": 81.14, "merge-prune": 81.18, "prune-merge": 81.50}
MORE = {
    "merge, means by size": {"operation": "merge", "mean": "size"},
    "merge, means by attention": {"operation": "merge", "mean": "attention"},
    "merge, means by attention, by cost": {"operation": "merge", "mean": "attention", "choice": "cost"},
    "no proportional attention": {"proportional": False},
}


def run(setting: Setting) -> None:
    table = Table(setting, "operation_order", "Ablation, compression module", PAPER)
    variants = {name: {"operation": name} for name in PAPER} | MORE
    for budget in setting.budgets:
        schedule = published_schedule(setting.model, budget)
        for name, changes in variants.items():
            table.measure(name, diffrate.compress(setting.model, schedule, **changes), budget=budget)


if __name__ == "__main__":
    main(__doc__, run)
