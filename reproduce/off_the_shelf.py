"""Table 1: methods at equal MACs on a pretrained model whose weights stay as they are.

Every row is paired with the uncompressed model and, as `to_search`, with the search at its budget. MACs are equal to
1 %, or the row says in a `note` by how much they are not; `padded_gmacs` is what ATS computes in batches, where images
are padded to the longest. Rows that are schedules name their operator; where it is not the search's, a second row has
the same counts under that one.

Cost: a search (about a minute for ViT-Ti on an H200, minutes on a CPU) and a pass over the validation images for each
method and budget; ATS takes some twenty more over 256 to 511 of them, to find its setting. The
paper's models: `--model deit_small_patch16_224 --pretrained --data-dir imagenet --search-split train
--budgets 2.3G,2.9G`, which needs ImageNet and a download; `--model caformer_s36 --budgets 5.2G,5.6G,6.0G` is its table
of CAFormer. Methods that are trained first are left out: with_training.py has them. `--again ats` measures methods
anew at `--budgets`, beside the searches that the file of `--json` has there.

Measured here: results/reproduce_vit_tiny_off_the_shelf_h200.json: ViT-Ti at 0.655 GMACs on 2,000 images has top-1 74.35
searched, 72.60 with the paper's counts and operator, 71.25 by ToMe; the loss rises by 0.039, 0.110 and 0.196. The
embedded model: results/reproduce_embedded_off_the_shelf_h200.json.

    python reproduce/off_the_shelf.py --json results/reproduce_embedded_off_the_shelf_cpu.json
    python reproduce/off_the_shelf.py --model vit_tiny_patch16_224 --checkpoint vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet --crop-pct 1.0 --budgets 1.0G,0.81G,0.655G \\
        --json results/reproduce_vit_tiny_off_the_shelf_h200.json
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import setting as shared
import torch
from setting import Setting, Table, save
from torch import nn

import diffrate
from diffrate.errors import DiffRateError
from diffrate.evaluate import Evaluation, compare_evaluations
from diffrate.methods import METHODS, build, cost_of, named
from diffrate.methods.by_image import ImageCosts, decides_by_image, spread_images
from diffrate.methods.fit import off_budget
from diffrate.methods.policy import MethodModel
from diffrate.results import in_words, origin
from diffrate.schedule import write_text

KEY, TITLE = "off_the_shelf", "Table 1, off the shelf"
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
    table = Table(setting, KEY, TITLE, PAPER)
    images = spread_images(setting.val)
    for budget in setting.budgets:
        schedule, seconds = setting.search(budget)
        ours = diffrate.compress(setting.model, schedule)
        searched = measure(table, "search", ours, budget, None, search_seconds=seconds)
        for name in METHODS:
            if name != "search":
                beside(table, name, budget, schedule, searched, images)


def beside(
    table: Table,
    name: str,
    budget: float,
    schedule: diffrate.Schedule,
    searched: Evaluation,
    images: torch.Tensor,
) -> None:
    """Add a method's row beside a search; where it is a schedule, also one under the operator of the search."""
    whole = table.setting.model
    try:
        model = build(name, whole, budget, images)
    except DiffRateError as error:
        table.add(name, budget=budget, left_out=str(error))
        return
    for label, each in twins(name, model, schedule):
        measure(table, label, each, budget, searched)


def twins(name: str, model: nn.Module, searched: diffrate.Schedule) -> Iterator[tuple[str, nn.Module]]:
    """A method's model and, where it is a schedule, its counts under the operator of the search."""
    yield name, model
    if is_schedule(model) and model.operator != searched.operator:
        under = replace(model.schedule, operator=searched.operator)
        yield f"{name}, the search's operator", diffrate.compress(model.original, under)


def again(setting: Setting, names: Sequence[str], file: Path) -> None:
    """Put new rows of some methods in the place of those that a file has; they say where they are from."""
    rows = shared.rows_in(file, "tables", KEY)
    if "search" in names:
        raise DiffRateError("--again keeps the searches: run a new one without it")
    record = json.loads(file.read_text(encoding="utf-8"))
    known = record["results"]
    if (known["model"], known["uncompressed"]["images"]) != (setting.name, setting.whole.images):
        raise DiffRateError(f"{file} is of another model or other images")
    searches = {budget: shared.searched_at(file, rows, budget) for budget in setting.budgets}
    setting.json = None  # the rest of the file stays what it is
    table = Table(setting, KEY, TITLE, PAPER)
    images = spread_images(setting.val)
    for budget, schedule in searches.items():
        searched = setting.evaluated(diffrate.compress(setting.model, schedule))
        for name in names:
            beside(table, named(name).name, budget, schedule, searched, images)
    measured = in_words(origin(shlex.join(["python", *sys.argv]), setting.device))
    for row in table.rows:
        row["measured"] = measured
    new = {(row["name"], row["budget"]): row for row in table.rows}
    rows = [new.pop((old["name"], old["budget"]), old) for old in rows] + list(new.values())
    known["tables"][KEY]["rows"] = rows
    write_text(file, json.dumps(record, indent=2, allow_nan=False) + "\n")


def measure(
    table: Table, name: str, model: nn.Module, budget: float, searched: Evaluation | None, **more: Any
) -> Evaluation:
    """Add a row that says by how much it misses the budget, and how it differs from the search's."""
    cost = cost_of(model)
    if decides_by_image(model):
        cost, more["padded_gmacs"] = costs(model, table.setting.val)
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


def costs(model: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    """Mean GMACs of an image alone, and padded to its batch's longest."""
    meter, device = ImageCosts(model), next(model.parameters()).device
    with torch.inference_mode():
        for images, _ in batches:
            meter.add(images.to(device))
    return meter.mean(), meter.padded()


def main() -> None:
    flags = shared.parser(__doc__)
    flags.add_argument("--again", help="methods, with commas, of which the file of --json gets new rows")
    arguments = flags.parse_args()
    with shared.ended_in_a_sentence():
        if arguments.again and arguments.json is None:
            raise DiffRateError("--again needs --json, a file with the searches of an earlier run")
        setting = shared.setting(arguments)
        if arguments.again:
            again(setting, arguments.again.split(","), arguments.json)
        else:
            run(setting)


if __name__ == "__main__":
    main()
