"""Ablation (d): how long a search must run. DeiT-B at 11.5 GMACs there, GPU hours on all of ImageNet.

Here the steps of the fast recipe at the tightest budget, with seconds on this machine. Cost: a search each.

    python reproduce/optimisation_time.py --json results/optimisation_time_embedded.json
"""

from __future__ import annotations

from setting import Setting, Table, main

PAPER = {"0.9 GPU hours": 81.32, "2.7 GPU hours": 81.50, "9 GPU hours": 81.50, "27 GPU hours": 81.52}
STEPS = (10, 30, 60, 120, 240)


def run(setting: Setting) -> None:
    table = Table(setting, "optimisation_time", "Ablation, optimisation time", PAPER)
    budget = setting.budgets[-1]
    for steps in STEPS:
        schedule, seconds = setting.search(budget, steps=steps)
        table.measure(f"{steps} steps", schedule, budget=budget, steps=steps, search_seconds=seconds)


if __name__ == "__main__":
    main(__doc__, run)
