"""Table 1: methods at equal MACs on a pretrained model whose weights stay as they are.

Every row is paired with the uncompressed model and, as `to_search`, with the search at its budget. MACs are equal to
1 %, or the row says in a `note` by how much they are not; `padded_gmacs` is what ATS computes in batches, where images
are padded to the longest. Rows that are schedules name their operator; where it is not the search's, a second row has
the same counts under that one.

Cost: a search (about a minute for ViT-Ti on an H200, minutes on a CPU) and a pass over the
validation images for each method and budget; ATS takes a dozen more over 256 to 511 of them, to find its setting. The
paper's models: `--model deit_small_patch16_224 --pretrained --data-dir imagenet --search-split train
--budgets 2.3G,2.9G`, which needs ImageNet and a download; `--model caformer_s36 --budgets 5.2G,5.6G,6.0G` is its table
of CAFormer. Methods that are trained first are left out: with_training.py has them.

Measured here: results/reproduce_vit_tiny_off_the_shelf_h200.json: ViT-Ti at 0.655 GMACs on 2,000 images has top-1 74.35
searched, 72.60 with the paper's counts and operator, 71.25 by ToMe; the loss rises by 0.039, 0.110 and 0.196. The
embedded model: results/reproduce_embedded_off_the_shelf_h200.json.

    python reproduce/off_the_shelf.py --json results/reproduce_embedded_off_the_shelf_cpu.json
    python reproduce/off_the_shelf.py --model vit_tiny_patch16_224 --checkpoint vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet --crop-pct 1.0 --budgets 1.0G,0.81G,0.655G \\
        --json results/reproduce_vit_tiny_off_the_shelf_h200.json
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeGuard

import torch
from setting import Setting, Table, main, save
from torch import nn

import diffrate
from diffrate.errors import DiffRateError
from diffrate.evaluate import Evaluation, compare_evaluations
from diffrate.methods import METHODS, build, cost_of
from diffrate.methods.by_image import ImageCosts, decides_by_image, spread_images
from diffrate.methods.fit import off_budget
from diffrate.methods.policy import MethodModel

# GMACs and top-1 on ImageNet-1k, as the paper has them
PAPER = {
    "deit_small_patch16_224": {
        "uncompressed": (4.6, 79.82), "evit": [(2.3, 73.83), (3.0, 78.50)], "tome": [(2.3, 77.99), (2.9, 78.89)],
        "diffrate": [(2.3, 78.76), (2.9, 79.58)],
    },
    "deit_base_patch16_224": {
        "uncompressed": (17.6, 81.83), "evit": [(8.7, 74.61), (11.5, 80.37)], "tome": [(8.8, 77.84), (11.5, 80.58)],
        "diffrate": [(8.7, 78.98), (11.5, 81.50)],
    },
    "vit_base_patch16_224.mae": {
        "uncompressed": (17.6, 83.72), "evit": [(8.7, 75.15), (11.5, 82.01)], "tome": [(8.8, 78.86), (11.5, 82.32)],
        "diffrate": [(8.7, 79.96), (11.5, 82.91)],
    },
    "vit_large_patch16_224.mae": {
        "uncompressed": (61.6, 85.95), "evit": [(29.7, 81.52), (39.6, 85.06)], "tome": [(31.0, 84.24), (42.3, 85.41)],
        "diffrate": [(31.0, 84.65), (42.3, 85.56)],
    },
    "vit_huge_patch14_224.mae": {
        "uncompressed": (167.4, 86.88), "evit": [(99.1, 85.54), (112.9, 86.32)],
        "tome": [(92.9, 86.01), (103.4, 86.29)], "diffrate": [(93.2, 86.40), (103.4, 86.72)],
    },
    "caformer_s36": {"uncompressed": (8.0, 84.45), "diffrate": [(5.2, 83.49), (5.6, 83.92), (6.0, 84.21)]},
    "LV-ViT-S": {"uncompressed": (6.6, 83.30), "evit": [(3.9, 79.77)], "diffrate": [(3.9, 82.56)]},
}  # fmt: skip


def run(setting: Setting) -> None:
    table = Table(setting, "off_the_shelf", "Table 1, off the shelf", PAPER)
    images = spread_images(setting.val)
    for budget in setting.budgets:
        schedule, seconds = setting.search(budget)
        ours = diffrate.compress(setting.model, schedule)
        searched = measure(table, "search", ours, budget, None, search_seconds=seconds)
        for name in METHODS:
            if name == "search":
                continue
            try:
                model = build(name, setting.model, budget, images)
            except DiffRateError as error:
                table.add(name, budget=budget, left_out=str(error))
                continue
            measure(table, name, model, budget, searched)
            if is_schedule(model) and model.operator != ours.operator:
                again = diffrate.compress(setting.model, replace(model.schedule, operator=schedule.operator))
                measure(table, f"{name}, the search's operator", again, budget, searched)


def measure(
    table: Table, name: str, model: nn.Module, budget: float, searched: Evaluation | None, **more: Any
) -> Evaluation:
    """Add a row that says by how much it misses the budget, and how it differs from the search's."""
    cost = cost_of(model)
    if decides_by_image(model):
        cost, more["padded_gmacs"] = costs(model, table.setting)
    if is_schedule(model):
        more["operator"] = model.operator.in_words()
    if note := off_budget(cost, budget):
        more["note"] = note
    result = table.measure(name, model, cost, budget=budget, **more)
    if searched is not None:
        table.rows[-1]["to_search"] = to_search(result, searched)
        save(table.setting)
    return result


def to_search(result: Evaluation, searched: Evaluation) -> dict[str, Any]:
    """The paired difference of a row to the search's."""
    c = compare_evaluations(result, searched)
    return {
        "points": c.top1_difference,
        "points_interval": c.top1_interval,
        "loss_difference": c.loss_difference,
        "loss_interval": c.loss_interval,
        "mcnemar_p": c.mcnemar_p,
    }


def is_schedule(model: nn.Module) -> TypeGuard[diffrate.CompressedModel]:
    return isinstance(model, diffrate.CompressedModel) and not isinstance(model, MethodModel)


def costs(model: nn.Module, setting: Setting) -> tuple[float, float]:
    """Mean GMACs of an image alone, and padded to its batch's longest."""
    meter = ImageCosts(model)
    with torch.inference_mode():
        for images, _ in setting.val:
            meter.add(images)
    return meter.mean(), meter.padded()


if __name__ == "__main__":
    main(__doc__, run)
