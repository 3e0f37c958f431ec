"""Schedule transfer: counts found for other models, at this model's budget. DeiT-T and DeiT-B to DeiT-S there (figure).

The published counts of each family of this depth and number of tokens, moved onto the budget, all under one operator,
and the counts searched for this model itself. The paper's figure has no numbers to quote: its own counts were best,
those of DeiT-T close, those of DeiT-B clearly worse.

Cost: a search for each budget, and a pass over the validation images for each family and budget.

Measured here: results/reproduce_vit_tiny_transfer_h200.json, ViT-Ti at 0.655 GMACs: the loss rises by 0.039 with its
own counts, 0.045 with those of DeiT-T, 0.055 with those of DeiT-S and 0.057 with those of DeiT-B. The embedded model:
results/reproduce_embedded_transfer_h200.json.

    python reproduce/transfer.py --json results/reproduce_embedded_transfer_cpu.json
    python reproduce/transfer.py --model vit_tiny_patch16_224 --checkpoint vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet --crop-pct 1.0 --budgets 1.0G,0.81G,0.655G \\
        --json results/reproduce_vit_tiny_transfer_h200.json
"""

from __future__ import annotations

from dataclasses import replace

from setting import Setting, Table, main

from diffrate import published
from diffrate.backbones import backbone_of
from diffrate.methods.schedules import published_schedule

PAPER = "a figure without numbers: self best, ViT-T close, ViT-B clearly worse (on ViT-S)"


def run(setting: Setting) -> None:
    table = Table(setting, "transfer", "Schedule transfer", PAPER)
    layout = backbone_of(setting.model).layout
    families = [f for f in published.FAMILIES if (f.depth, f.tokens) == (layout.depth, layout.tokens)]
    for budget in setting.budgets:
        own, _ = setting.search(budget)
        table.measure("its own", own, budget=budget)
        for family in families:
            counts = published_schedule(setting.model, budget, family.name)
            table.measure(f"from {family.name}", replace(counts, operator=own.operator), budget=budget)


if __name__ == "__main__":
    main(__doc__, run)
