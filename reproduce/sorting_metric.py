"""Ablation (a): what ranks tokens, with the paper's counts for a model of this shape. DeiT-B at 11.5 GMACs there.

Cost: four passes over the validation images for each budget; no search.

    python reproduce/sorting_metric.py --json results/sorting_metric_embedded.json
"""

from __future__ import annotations

from setting import Setting, Table, main

import diffrate
from diffrate.methods.schedules import published_schedule

PAPER = {"random": 79.72, "image-attention": 81.38, "class-attention-value": 81.53, "class-attention": 81.50}


def run(setting: Setting) -> None:
    table = Table(setting, "sorting_metric", "Ablation, sorting metric", PAPER)
    for budget in setting.budgets:
        schedule = published_schedule(setting.model, budget)
        for importance in PAPER:
            model = diffrate.compress(setting.model, schedule, importance=importance)
            table.measure(importance, model, budget=budget)


if __name__ == "__main__":
    main(__doc__, run)
