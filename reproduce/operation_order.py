"""Ablation (b): pruning, merging, and both in either order, with the paper's counts. DeiT-B at 11.5 GMACs there.

The paper searches counts for each; here they are the published ones of pruning, then merging. Below it, the choices
that this package adds to the operator: what a merged token becomes and which tokens are merged.

Cost: eight passes over the validation images for each budget; no search.

Measured here: results/reproduce_vit_tiny_cpu.json, ViT-Ti at 0.655 GMACs on 2,000 images: top-1 68.50 pruned, 73.30
merged, 71.60 merged, then pruned, 72.45 pruned, then merged. The embedded model: results/reproduce_embedded_cpu.json.

    python reproduce/operation_order.py --json results/reproduce_embedded_operation_order_cpu.json
    python reproduce/operation_order.py --model vit_tiny_patch16_224 --checkpoint vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet --crop-pct 1.0 --budgets 1.0G,0.81G,0.655G \\
        --json results/reproduce_vit_tiny_operation_order_h200.json
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
