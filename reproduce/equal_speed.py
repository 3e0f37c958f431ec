"""Beyond the paper: the paper's schedules where they run as fast as the searched ones.

Merging by cost takes time that pruning does not, so that at equal MACs the paper's schedules are faster. Here each is
moved to the MACs at which it should be as fast as the search: on a line between those whose speed `diffrate compare`
measured, and the whole model. Under the paper's operator, and paired with the search on the same images.

Cost: two passes over the validation images for each budget of the comparison; no search, and nothing is timed.

Measured here: results/reproduce_vit_tiny_equal_speed_cpu.json: at the speeds of searches for 1.0, 0.81 and 0.655 GMACs
on an H200 the paper's schedules have 1.06, 0.90 and 0.76 GMACs, and losses that differ from the search's by -0.001,
+0.007 and +0.003, each within its interval.

    python reproduce/equal_speed.py --compared results/compare_vit_tiny_h200.json --model vit_tiny_patch16_224 \\
        --checkpoint vit_tiny_patch16_224.safetensors --data-dir imagenet --crop-pct 1.0 \\
        --json results/reproduce_vit_tiny_equal_speed_cpu.json
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import setting as shared
from off_the_shelf import to_search
from setting import Setting, Table

import diffrate
from diffrate.errors import DiffRateError
from diffrate.methods.schedules import published_schedule

PAPER = "nothing of the kind"
TITLE = "The paper's schedules as fast as the searched ones"


def run(setting: Setting, compared: Path) -> None:
    table = Table(setting, "equal_speed", TITLE, PAPER)
    rows = shared.rows_in(compared)
    known = [(1.0, diffrate.gmacs(setting.model)), *points(rows, "published")]
    for row in rows:
        if row["method"] != "searched":
            continue
        speed, budget = row["speed"]["of_uncompressed"], row["budget"]
        schedule = diffrate.Schedule.from_dict(row["settings"]["schedule"])
        searched = table.measure("search", schedule, budget=budget, speed=speed)
        as_fast = published_schedule(setting.model, between(known, speed))
        result = table.measure("the paper's, as fast", as_fast, budget=budget, speed=speed)
        table.rows[-1]["to_search"] = to_search(result, searched)
        shared.save(setting)


def points(rows: Sequence[dict[str, Any]], method: str) -> list[tuple[float, float]]:
    """The speed and the GMACs of a method at each budget."""
    return [
        (row["speed"]["of_uncompressed"], row["gmacs"])
        for row in rows
        if row["method"] == method and row.get("speed")
    ]


def between(known: Sequence[tuple[float, float]], speed: float) -> float:
    """The GMACs of a speed, on lines between those that are known."""
    for (slow, above), (fast, below) in itertools.pairwise(sorted(known)):
        if slow <= speed <= fast:
            return above + (below - above) * (speed - slow) / (fast - slow)
    raise DiffRateError(f"no speeds on both sides of {speed:.2f} were measured")


def main() -> None:
    flags = shared.parser(__doc__)
    flags.add_argument(
        "--compared", type=Path, required=True, help="what `diffrate compare` wrote, with its speeds"
    )
    arguments = flags.parse_args()
    with shared.ended_in_a_sentence():
        run(shared.setting(arguments), arguments.compared)


if __name__ == "__main__":
    main()
