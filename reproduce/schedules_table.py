"""The table of published schedules: what each costs by this package's count, beside the paper's figure. No images.

python reproduce/schedules_table.py
"""

from __future__ import annotations

import timm
import torch

import diffrate
from diffrate import published


def rows() -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for family in published.FAMILIES:
        pool = "avg" if family.mean_pooled else "token"
        with torch.device("meta"):
            model = timm.create_model(family.models[0].split(".")[0], num_classes=1000, global_pool=pool)
        for row in published.table():
            if row["family"] == family.name:
                schedule = diffrate.Schedule(row["prune"], row["merge"])
                found.append(
                    {
                        "family": family.name,
                        "paper_gmacs": row["gmacs"],
                        "gmacs": diffrate.gmacs(model, schedule),
                        "monotone": schedule.is_monotone,
                        "prune": row["prune"],
                        "merge": row["merge"],
                    }
                )
    return found


if __name__ == "__main__":
    for row in rows():
        rises = "" if row["monotone"] else "  counts rise; their running minimum runs"
        print(f"{row['family']:12s} paper {row['paper_gmacs']:6.1f}  here {row['gmacs']:8.3f} GMACs{rises}")
        print(f"    prune {row['prune']}\n    merge {row['merge']}")
