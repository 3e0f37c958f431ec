"""Every table and figure that runs without training, one after the other, within a time that you give.

Rows are saved after each, so that a run that is cut off leaves what it measured. In the order of their worth. The
10,000 random schedules are the larger half of it; `--random` asks for fewer.

    python reproduce/all.py --json results/reproduce_embedded.json --minutes 30 --random 50 --images 500
    python reproduce/all.py --model vit_tiny_patch16_224 --checkpoint imagenet/vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet --crop-pct 1.0 --budgets 1.0G,0.81G,0.655G --minutes 10 \\
        --json results/reproduce_vit_tiny.json
"""

from __future__ import annotations

import sys

import number_of_images
import off_the_shelf
import operation_order
import optimisation_time
import overhead
import schedule_comparison
import schedules_table
import setting as shared
import sorting_metric
import transfer
from setting import OutOfTimeError, Setting, Table

from diffrate.errors import DiffRateError


def without_images(setting: Setting) -> None:
    table = Table(setting, "overhead", "Overhead", overhead.PAPER)
    table.add("the paper's formulas", **overhead.formulas())
    for name, gmacs in (("deit_tiny_patch16_224", 0.8), ("deit_small_patch16_224", 2.9)):
        table.add(name, **overhead.counted(name, gmacs))
    table = Table(setting, "schedules", "Published schedules", "their GMACs are in the rows")
    for row in schedules_table.rows():
        table.add(f"{row['family']} {row['paper_gmacs']}", gmacs=row["gmacs"], monotone=row["monotone"])


def main() -> None:
    flags = shared.parser(__doc__)
    flags.add_argument("--random", type=int, default=schedule_comparison.RANDOM, help="random schedules")
    arguments = flags.parse_args()
    try:
        setting = shared.setting(arguments)
    except DiffRateError as error:
        sys.exit(f"Error: {error}")
    experiments = {
        "off_the_shelf": off_the_shelf.run,
        "sorting_metric": sorting_metric.run,
        "operation_order": operation_order.run,
        "transfer": transfer.run,
        "without_images": without_images,
        "schedule_comparison": lambda s: schedule_comparison.run(s, arguments.random),
        "number_of_images": number_of_images.run,
        "optimisation_time": optimisation_time.run,
    }
    for name, run in experiments.items():
        try:
            run(setting)
        except OutOfTimeError:
            print(f"out of time in {name}: the rows so far are saved", flush=True)
            return
        except DiffRateError as error:
            print(f"{name} does not fit this model: {error}", flush=True)


if __name__ == "__main__":
    main()
