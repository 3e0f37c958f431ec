"""Ablation (c): how many images a search needs. DeiT-B at 11.5 GMACs there, 1,000 images to all of ImageNet.

Here a search by the fast recipe at the tightest budget, on random subsets of the search images.

Cost: a search each: five, of 33 to 49 s on a shared H200 with ViT-Ti, of 18 to 30 s with the embedded model.

Measured here: results/reproduce_vit_tiny_number_of_images_h200.json, ViT-Ti at 0.655 GMACs: the loss rises by 0.044
with 64 images, 0.037 with 500, 0.039 with 1,000. The embedded model:
results/reproduce_embedded_number_of_images_h200.json.

    python reproduce/number_of_images.py --json results/reproduce_embedded_number_of_images_cpu.json
    python reproduce/number_of_images.py --model vit_tiny_patch16_224 --checkpoint vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet --crop-pct 1.0 --budgets 1.0G,0.81G,0.655G \\
        --json results/reproduce_vit_tiny_number_of_images_h200.json
"""

from __future__ import annotations

from setting import Setting, Table, main

PAPER = {"1000": 81.40, "4000": 81.46, "16000": 81.50, "all": 81.50}
COUNTS = (64, 125, 250, 500, 1000, 4000, 16000)


def run(setting: Setting) -> None:
    table = Table(setting, "number_of_images", "Ablation, number of images", PAPER)
    budget = setting.budgets[-1]
    there = len(setting.search_data[0])
    for count in sorted({min(count, there) for count in COUNTS}):
        schedule, seconds = setting.search(budget, images=None if count == there else count)
        table.measure(f"{count} images", schedule, budget=budget, images=count, search_seconds=seconds)


if __name__ == "__main__":
    main(__doc__, run)
