"""Table 2: methods after fine-tuning. Needs fine-tuned weights, which this package does not make yet.

Give weights that were fine-tuned under the published schedule (30 epochs on ImageNet, AdamW, lr 2e-5, weight decay
0.05), and this measures them under it, beside the untouched model: `--tuned weights.safetensors`. Nothing of this table
was run here. Cost: two passes over the validation images for each budget.

    python reproduce/with_training.py --model deit_small_patch16_224 --pretrained --data-dir imagenet \\
        --search-split train --budgets 2.9G --tuned tuned.safetensors
"""

from __future__ import annotations

from pathlib import Path

import setting as shared
from setting import Setting, Table

import diffrate
from diffrate.methods.schedules import published_schedule
from diffrate.models import load_model

PAPER = {
    "deit_small_patch16_224": {
        "uncompressed": 79.82, "DynamicViT 2.9": 79.30, "Evo-ViT 3.0": 79.40, "EViT 3.0": 79.50, "ToMe 2.9": 79.49,
        "ATS 2.9": 79.70, "SPViT 2.6": 79.34, "DiffRate 2.9, off the shelf": 79.58, "DiffRate 2.9, tuned": 79.83,
    },
    "deit_base_patch16_224": {
        "uncompressed": 81.83, "EViT 11.5": 81.30, "ToMe 11.5": 81.41, "DiffRate 11.5, off the shelf": 81.50,
        "DiffRate 11.5, tuned": 81.71,
    },
}  # fmt: skip


def run(setting: Setting, tuned: Path | None = None) -> None:
    table = Table(setting, "with_training", "Table 2, with training", PAPER)
    for budget in setting.budgets:
        schedule = published_schedule(setting.model, budget)
        table.measure("off the shelf", schedule, budget=budget)
        if tuned is not None:
            weights = load_model(setting.name, tuned).to(setting.device)
            table.measure("tuned", diffrate.compress(weights, schedule), budget=budget)


if __name__ == "__main__":
    flags = shared.parser(__doc__)
    flags.add_argument("--tuned", type=Path, help="weights fine-tuned under the published schedule")
    arguments = flags.parse_args()
    run(shared.setting(arguments), arguments.tuned)
