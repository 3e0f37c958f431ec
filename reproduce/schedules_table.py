"""The table of published schedules: what each costs by this package's count, beside the paper's figure. No images.

Cost: half a minute on a busy CPU core; models are built without weights.

Measured here: results/reproduce_schedules_cpu.json, where the paper's 0.6 GMACs of DeiT-T are 0.655, and its 11.5 of
DeiT-B are 11.52.

    python reproduce/schedules_table.py --json results/reproduce_schedules_cpu.json
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import timm
import torch
from setting import without_images

import diffrate
from diffrate import published

TITLE = "Published schedules"
PAPER = "its figures of the cost are in the rows"


def name(family: str, gmacs: float) -> str:
    return f"{family} {gmacs}"


def rows() -> Iterator[dict[str, Any]]:
    for family in published.FAMILIES:
        pool = "avg" if family.mean_pooled else "token"
        with torch.device("meta"):
            model = timm.create_model(family.models[0].split(".")[0], num_classes=1000, global_pool=pool)
        for row in published.table():
            if row["family"] == family.name:
                schedule = diffrate.Schedule(row["prune"], row["merge"])
                yield {
                    "name": name(family.name, row["gmacs"]),
                    "paper_gmacs": row["gmacs"],
                    "gmacs": diffrate.gmacs(model, schedule),
                    "monotone": schedule.is_monotone,
                    "prune": row["prune"],
                    "merge": row["merge"],
                }


if __name__ == "__main__":
    without_images(__doc__, "schedules", TITLE, PAPER, rows())
