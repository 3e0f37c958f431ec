"""Ablation (d): how long a search must run. DeiT-B at 11.5 GMACs there, GPU hours on all of ImageNet.

Here the steps of the fast recipe at the tightest budget, with seconds on this machine.

Cost: a search each: five, of 20 to 78 s on a shared H200 with ViT-Ti, of 14 to 37 s with the embedded model.

Measured here: results/reproduce_vit_tiny_optimisation_time_h200.json, ViT-Ti at 0.655 GMACs: the loss rises by 0.039
after 10 steps, 0.033 after 30, 0.039 after 240, all of it noise; seconds say little of how long a search takes, since a
race began beside them. The embedded model: results/reproduce_embedded_optimisation_time_h200.json.

    python reproduce/optimisation_time.py --json results/reproduce_embedded_optimisation_time_h200.json
    python reproduce/optimisation_time.py --model vit_tiny_patch16_224 --checkpoint vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet --crop-pct 1.0 --budgets 1.0G,0.81G,0.655G \\
        --json results/reproduce_vit_tiny_optimisation_time_h200.json
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
