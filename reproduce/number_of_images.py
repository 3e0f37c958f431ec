"""Ablation (c): how many images a search needs. DeiT-B at 11.5 GMACs there, 1,000 images to all of ImageNet.

Here a search by the fast recipe at the tightest budget, on random subsets of the search images. Cost: a search each.

    python reproduce/number_of_images.py --json results/number_of_images_embedded.json
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
