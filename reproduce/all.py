"""Most of the tables and figures that need no training, one after the other, within a time that you give.

In the order of their worth, the race, which takes longest, at the end. Rows are saved after each, so that a run that is
cut off leaves what it measured, in one file an experiment, under the name that its own command has:
reproduce_vit_tiny_transfer_h200.json. On a CPU ask for fewer of the 10,000 random schedules (`--random`) and images.

Cost: whatever `--minutes` says; the experiments say what each needs. Searches of ViT-Ti on a shared H200 took 160 s in
all for Table 1 at three budgets, 213 s for number_of_images and 259 s for optimisation_time at one.

Measured here: results/reproduce_vit_tiny_off_the_shelf_h200.json and its neighbours, ViT-Ti with top-1 75.20 on 2,000
images in half precision; on a CPU it has 75.25, results/reproduce_vit_tiny_cpu.json.

    python reproduce/all.py --json-dir results --minutes 40 --random 60 --images 400 --steps 20 --search-batch 20
    python reproduce/all.py --model vit_tiny_patch16_224 --checkpoint imagenet/vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet/search --val-dir imagenet/val --crop-pct 1.0 --budgets 1.0G,0.81G,0.655G --workers 14 \\
        --minutes 12 --json-dir results
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import ablations_searched
import calibration
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
import transfer
from setting import OutOfTimeError, Setting, Table

from diffrate.devices import device_name
from diffrate.errors import DiffRateError
from diffrate.results import check_target


def without_images(setting: Setting) -> None:
    tables = {"overhead": overhead, "schedules": schedules_table}
    for name, module in tables.items():
        table = Table(setting, name, module.TITLE, module.PAPER)
        for row in module.rows():
            table.add(**row)


def experiments(random: int = schedule_comparison.RANDOM) -> dict[str, Callable[[Setting], None]]:
    return {
        "off_the_shelf": off_the_shelf.run,
        "improvements": improvements.run,
        "sorting_metric": sorting_metric.run,
        "operation_order": operation_order.run,
        "transfer": transfer.run,
        "calibration": calibration.run,
        "without_images": without_images,
        "number_of_images": number_of_images.run,
        "optimisation_time": optimisation_time.run,
        "ablations_searched": ablations_searched.run,
        "schedule_comparison": lambda setting: schedule_comparison.run(setting, random),
    }


def results_file(folder: Path, model: str, experiment: str, device: str) -> Path:
    """Where the page looks for an experiment: reproduce_vit_tiny_transfer_h200.json."""
    short, machine = model.partition(".")[0].partition("_patch")[0], device.split()[-1].lower()
    return folder / f"reproduce_{short}_{experiment}_{machine}.json"


def main() -> None:
    flags = shared.parser(__doc__)
    flags.add_argument(
        "--json-dir", type=Path, help="folder for reproduce_MODEL_EXPERIMENT_DEVICE.json, in place of --json"
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
    try:
        check_target(arguments.json_dir and arguments.json_dir / "any.json")
        setting = shared.setting(arguments)
    except DiffRateError as error:
        sys.exit(f"Error: {error}")
    device = device_name(setting.device) if setting.device.type == "cuda" else "cpu"
    for name, run in chosen.items():
        if arguments.json_dir is not None:
            setting.json, setting.tables = results_file(arguments.json_dir, setting.name, name, device), {}
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
