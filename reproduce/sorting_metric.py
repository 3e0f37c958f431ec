"""Ablation (a): what ranks tokens, with the paper's counts for a model of this shape. DeiT-B at 11.5 GMACs there.

Cost: four passes over the validation images for each budget; no search.

Measured here: results/reproduce_vit_tiny_cpu.json, ViT-Ti at 0.655 GMACs on 2,000 images: top-1 68.10 by chance, 73.20
by image attention, 73.05 by class attention times values, 72.45 by class attention. The embedded model:
results/reproduce_embedded_h200.json.

    python reproduce/sorting_metric.py --json results/reproduce_embedded_sorting_metric_cpu.json
    python reproduce/sorting_metric.py --model vit_tiny_patch16_224 --checkpoint vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet --crop-pct 1.0 --budgets 1.0G,0.81G,0.655G \\
        --json results/reproduce_vit_tiny_sorting_metric_h200.json
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
