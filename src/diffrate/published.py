"""The schedules published with the paper, by family and budget, and which timm models each one fits."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from torch import nn

from diffrate.backbones import Layout, backbone_of
from diffrate.costs.macs import gmacs as gmacs_of
from diffrate.errors import DiffRateError
from diffrate.operator import Operator
from diffrate.schedule import Schedule

ORIGIN = "published with DiffRate (ICCV 2023)"


@dataclass(frozen=True)
class Family:
    """One model of the paper: its shape, and the timm names that carry its weights."""

    name: str
    depth: int
    tokens: int
    dim: int
    mean_pooled: bool
    models: tuple[str, ...]
    prefix: int = 1
    operator: Operator = Operator()


FAMILIES = (
    Family("ViT-T-DeiT", 12, 197, 192, False, ("deit_tiny_patch16_224",)),
    Family("ViT-S-DeiT", 12, 197, 384, False, ("deit_small_patch16_224",)),
    Family("ViT-B-DeiT", 12, 197, 768, False, ("deit_base_patch16_224",)),
    Family("ViT-B-MAE", 12, 197, 768, True, ("vit_base_patch16_224.mae",)),
    Family("ViT-L-MAE", 24, 197, 1024, True, ("vit_large_patch16_224.mae",)),
    Family("ViT-H-MAE", 32, 257, 1280, True, ("vit_huge_patch14_224.mae",)),
    Family("CAFormer-S36", 18, 196, 320, True, ("caformer_s36",), 0, Operator(operation="merge")),
)
# Names whose architecture is that of a family, with other weights: its schedules are borrowed.
SAME_SHAPE = {
    "vit_tiny_patch16_224": "ViT-T-DeiT",
    "vit_small_patch16_224": "ViT-S-DeiT",
    "vit_base_patch16_224": "ViT-B-DeiT",
    "vit_large_patch16_224": "ViT-L-MAE",
    "vit_huge_patch14_224": "ViT-H-MAE",
}


@functools.cache
def _data() -> dict[str, dict[str, dict[str, Any]]]:
    text = resources.files("diffrate").joinpath("published_schedules.json").read_text(encoding="utf-8")
    data: dict[str, dict[str, dict[str, Any]]] = json.loads(text)
    return data


def table() -> list[dict[str, Any]]:
    """Every published schedule that applies to a supported model, with the paper's GMACs figure."""
    return [
        {
            "family": family.name,
            "models": list(family.models),
            "gmacs": float(budget),
            "prune": prune,
            "merge": merge,
        }
        for family in FAMILIES
        for budget, (prune, merge) in _counts(family).items()
    ]


def for_shape(depth: int, tokens: int, dim: int, mean_pooled: bool) -> list[dict[str, Any]]:
    """The rows of the table for models with so many blocks and tokens and such a head: of this width, if there are."""
    alike = [f for f in FAMILIES if (f.depth, f.tokens, f.mean_pooled) == (depth, tokens, mean_pooled)]
    names = {f.name for f in alike if f.dim == dim} or {f.name for f in alike}
    return [row for row in table() if row["family"] in names]


def _counts(family: Family) -> dict[str, tuple[list[int], list[int]]]:
    """prune and merge counts by budget, one a block that is compressed.

    CAFormer's go on to the stage behind: its last block, listed with the restored grid, and the last stage are cut off.
    Nothing is pruned there, so each block hands all it received on to its merge.
    """
    found = {}
    for budget, counts in _data()[family.name].items():
        prune, merge = counts["prune"], counts["merge"]
        if prune is None:
            merge = [*merge[: family.depth - 1], merge[family.depth - 2]]
            prune = [merge[0], *merge[:-1]]
        found[budget] = (prune, merge)
    return found


def profiles() -> list[list[float]]:
    """The share of image tokens that each published class-token schedule keeps, block by block."""
    return [
        [(n - 1) / (counts["merge"][0] - 1) for n in itertools.accumulate(counts["merge"], min)]
        for family in FAMILIES
        if not family.mean_pooled
        for counts in _data()[family.name].values()
    ]


def by_name(model: str, gmacs: float) -> Schedule:
    """The schedule of a timm model name: exact names of the paper's models, or a model of the same shape."""
    base = model.removeprefix("hf_hub:").removeprefix("timm/")
    for family in FAMILIES:
        if any(base == name or base.startswith(name + ".") for name in family.models):
            return _schedule(family, gmacs, model)
    borrowed = SAME_SHAPE.get(base.split(".")[0])
    for family in FAMILIES:
        if family.name == borrowed:
            return _schedule(family, gmacs, model)
    names = [name for family in FAMILIES for name in family.models] + list(SAME_SHAPE)
    raise DiffRateError(f"no schedule is published for {model!r}; there are some for {', '.join(names)}")


def for_model(model: nn.Module, name: str, gmacs: float) -> tuple[Schedule, str | None]:
    """The schedule for a built model, by its name or, failing that, by its shape, and a note where it is borrowed."""
    layout = backbone_of(model).layout
    family, borrowed = family_of(layout, name)
    if family is None:
        shapes = "; ".join(f"{f.name}: {f.depth} blocks, {f.tokens} tokens, width {f.dim}" for f in FAMILIES)
        raise DiffRateError(
            f"no published schedule fits {name!r} ({layout.depth} blocks, {layout.tokens} tokens, width {layout.dim}); "
            f"published are {shapes}"
        )
    schedule = _schedule(family, gmacs, name)
    note = None
    if borrowed:
        note = f"the schedule was published for {family.name} and is borrowed for {name}, a model of the same shape"
        schedule = replace(schedule, made={**schedule.made, "note": note})
    return replace(schedule, cost={"gmacs": gmacs_of(model, schedule)}), note


def family_of(layout: Layout, name: str) -> tuple[Family | None, bool]:
    """The family whose schedules fit a model, by its name or its shape, if there is one; and whether it is borrowed."""
    shape = (layout.depth, layout.tokens, layout.dim)
    same_shape = [f for f in FAMILIES if (f.depth, f.tokens, f.dim) == shape]
    named = [f for f in same_shape if any(name == m or name.startswith(m + ".") for m in f.models)]
    pooled_alike = [f for f in same_shape if f.mean_pooled == layout.mean_pooled]
    families = [f for f in named or pooled_alike or same_shape if f.prefix == layout.prefix]
    return (families[0] if families else None), not named


def budgets_of(family: Family) -> list[float]:
    """The GMACs at which a family has schedules."""
    return sorted(map(float, _counts(family)))


def _schedule(family: Family, gmacs: float, model: str) -> Schedule:
    budgets = {float(budget): counts for budget, counts in _counts(family).items()}
    counts = budgets.get(round(gmacs, 3))
    if counts is None:
        known = ", ".join(f"{b:g}" for b in budgets)
        raise DiffRateError(f"no schedule of {gmacs:g} GMACs is published for {model}; there are {known}")
    return Schedule(
        prune=tuple(counts[0]),
        merge=tuple(counts[1]),
        prefix=family.prefix,
        operator=family.operator,
        model=model,
        img_size=(224, 224),
        cost={"paper_gmacs": round(gmacs, 3)},
        made={"by": ORIGIN, "family": family.name},
    )
