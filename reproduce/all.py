"""Every table and figure that runs without training, one after the other, within a time that you give.

Rows are saved after each, in one file a model, so that a run that is cut off leaves what it measured. In the order of
their worth. On a CPU ask for fewer of the 10,000 random schedules (`--random`) and images.

    python reproduce/all.py --json-dir results --minutes 40 --random 60 --images 400 --steps 20 --search-batch 20
    python reproduce/all.py --model vit_tiny_patch16_224 --checkpoint imagenet/vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet/search --val-dir imagenet/val --crop-pct 1.0 --budgets 1.0G,0.81G,0.655G --workers 14 \\
        --minutes 6 --json-dir results
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import improvements
import number_of_images
import off_the_shelf
import operation_order
import optimisation_time
import overhead
import schedule_comparison
import schedules_table
import setting as shared
import sorting_metric
import torch
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


def experiments(random: int = schedule_comparison.RANDOM) -> dict[str, Callable[[Setting], None]]:
    return {
        "off_the_shelf": off_the_shelf.run,
        "improvements": improvements.run,
        "schedule_comparison": lambda setting: schedule_comparison.run(setting, random),
        "sorting_metric": sorting_metric.run,
        "operation_order": operation_order.run,
        "transfer": transfer.run,
        "without_images": without_images,
        "number_of_images": number_of_images.run,
        "optimisation_time": optimisation_time.run,
    }


def main() -> None:
    flags = shared.parser(__doc__)
    flags.add_argument(
        "--json-dir", type=Path, help="folder for reproduce_MODEL_DEVICE.json, in place of --json"
    )
    flags.add_argument("--only", help="names of experiments, with commas: " + ", ".join(experiments()))
    flags.add_argument("--random", type=int, default=schedule_comparison.RANDOM, help="random schedules")
    arguments = flags.parse_args()
    chosen = experiments(arguments.random)
    if arguments.only:
        wanted = arguments.only.split(",")
        if not set(wanted) <= set(chosen):
            flags.error(f"--only names some of {', '.join(chosen)}")
        chosen = {name: chosen[name] for name in wanted}
    if arguments.json_dir is not None:
        device = "gpu" if torch.cuda.is_available() else "cpu"
        arguments.json = arguments.json_dir / f"reproduce_{arguments.model}_{device}.json"
    try:
        setting = shared.setting(arguments)
    except DiffRateError as error:
        sys.exit(f"Error: {error}")
    for name, run in chosen.items():
        try:
            run(setting)
        except OutOfTimeError:
            print(f"out of time in {name}: the rows so far are saved", flush=True)
            return
        except DiffRateError as error:
            print(f"{name} does not fit this model: {error}", flush=True)
        print(f"[{name}: {setting.seconds():.0f} s since the start]", flush=True)


if __name__ == "__main__":
    main()
