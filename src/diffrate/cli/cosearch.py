"""`diffrate cosearch`: a schedule and the accelerator design that goes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from diffrate.cli import costs as c
from diffrate.cli import options as o
from diffrate.cli.accelerators import start_accelerator
from diffrate.cli.output import counts, note, running_command, save_json, show_table
from diffrate.costs import METRICS, Costs, Design, GemminiCost, MacCost
from diffrate.costs.gemmini.cost import SLOPES
from diffrate.data import LARGEST_BATCH, preprocessing, search_datasets
from diffrate.devices import resolve_device
from diffrate.errors import DiffRateError
from diffrate.methods.evit import EViT
from diffrate.models import load_model
from diffrate.results import check_target
from diffrate.schedule import Schedule
from diffrate.searching.cosearch import HARDWARE_STEPS, CosearchResult, cosearch
from diffrate.searching.hardware import ESTIMATORS

COSEARCH = "Co-search"
EVIT_SHARE = 3.0 / 2.9  # of DiffRate's MACs, in the paper's table


def cosearch_command(
    model: o.ModelName,
    budget: Annotated[
        str, typer.Option(help="Targets to meet together: 2.9G,37ms,90mW.", rich_help_panel=COSEARCH)
    ],
    output: Annotated[
        Path, typer.Option(help="Folder for design, schedule, history and plot.", rich_help_panel=COSEARCH)
    ],
    checkpoint: o.Checkpoint = None,
    pretrained: o.Pretrained = False,
    num_classes: o.NumClasses = None,
    model_kwargs: o.ModelKwargs = None,
    img_size: o.ImgSize = None,
    data_dir: o.DataDir = None,
    dataset: o.DatasetName = "",
    split: o.Split = None,
    workers: o.Workers = 2,
    crop_pct: o.CropPct = None,
    schedule: o.ScheduleText = None,
    rounds: Annotated[
        int, typer.Option(help="Turns of hardware and rates.", min=1, rich_help_panel=COSEARCH)
    ] = 3,
    hardware_steps: Annotated[
        int, typer.Option(help="Steps of the hardware in a turn.", min=1, rich_help_panel=COSEARCH)
    ] = HARDWARE_STEPS,
    estimator: Annotated[
        str,
        typer.Option(
            help=f"How hardware costs are differentiated: {' or '.join(ESTIMATORS)}.",
            rich_help_panel=COSEARCH,
        ),
    ] = "priced",
    slopes: Annotated[
        str,
        typer.Option(
            help=f"How costs are differentiated in the counts: {' or '.join(SLOPES)}.",
            rich_help_panel=COSEARCH,
        ),
    ] = "table",
    largest_array: Annotated[
        int | None,
        typer.Option(
            help="Largest side of the array, such as 16; nothing else prices area.",
            min=1,
            rich_help_panel=COSEARCH,
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps of the rates in a turn.", min=1, rich_help_panel=COSEARCH)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Images a step.", min=1, max=LARGEST_BATCH, rich_help_panel=COSEARCH)
    ] = None,
    clock_mhz: c.ClockMhz = c.CLOCK,
    dram_pj: c.DramPj = 0.0,
    seed: Annotated[
        int, typer.Option(help="Seed of the search.", min=0, max=2**31 - 1, rich_help_panel=COSEARCH)
    ] = 0,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the co-search in the output folder.", rich_help_panel=COSEARCH
        ),
    ] = False,
    device: o.Device = None,
    json: o.JsonFile = None,
) -> None:
    """Learn compression rates and a Gemmini design together, in turns.

    With images (--data-dir or --dataset) the rates are learned; without, those of --schedule are moved onto the
    budget, which needs no weights. The embedded model learns on the images that ship. The table that is printed
    has the whole model, EViT and the schedule on Gemmini's default design, at MACs as in the paper's table, and
    what the co-search found. Power is energy over one period for all rows: that of the whole model on the
    default design.

    Several processes: accelerate launch -m diffrate cosearch …

    Example: diffrate cosearch --model deit_small_patch16_224 --schedule published:2.9 --budget 2.9G,37ms,80mW
    --output runs/co
    """
    check_target(json)
    check_target(output / "design.json")
    where = resolve_device(device)
    size = None if img_size is None else o.read_size(img_size)
    torch.manual_seed(
        seed
    )  # for weights that are not given: every process, and a resumed run, must have the same
    whole = load_model(model, checkpoint, pretrained, num_classes, size, o.read_kwargs(model_kwargs))
    start = None if schedule is None else o.read_schedule(schedule, whole, model)
    if start is None:
        dataset = o.dataset_for(model, dataset, data_dir)
    accelerator = start_accelerator(where, "fp16" if where.type == "cuda" else "no", None, output)
    main = accelerator.is_main_process
    data: Any = None
    options: dict[str, Any] = {}
    if data_dir is not None or dataset:
        if main:
            o.note_random_weights(model, checkpoint, pretrained)
        data = search_datasets(
            whole, data_dir, dataset, split, labels=False, heavy=False, img_size=size, crop_pct=crop_pct,
            mean=None, std=None, interpolation=None, class_map=None,
        )  # fmt: skip
        origin = {
            "checkpoint": None if checkpoint is None else str(checkpoint), "pretrained": pretrained,
            "model_kwargs": o.read_kwargs(model_kwargs), "num_classes": num_classes,
            "img_size": None if size is None else list(size), "data_dir": None if data_dir is None else str(data_dir),
            "dataset": dataset, "split": split, "preprocessing": preprocessing(whole, size, crop_pct),
        }  # fmt: skip
        options = {
            "steps": steps, "batch_size": batch_size, "workers": workers, "name": model, "origin": origin,
            "accelerator": accelerator, "command": running_command(),
        }  # fmt: skip
    elif start is None:
        raise DiffRateError(
            "give images (--data-dir or --dataset) to learn on, or a --schedule to start from"
        )
    workload = c.workload(whole, clock_mhz, dram_pj)
    found = cosearch(
        whole, data, budget, schedule=start, workload=workload, rounds=rounds, hardware_steps=hardware_steps,
        estimator=estimator, slopes=slopes, largest_array=largest_array, seed=seed, output=output, resume=resume,
        say=note if main else lambda _: None, **options,
    )  # fmt: skip
    if not main:
        return
    rows = comparison(whole, found, start, clock_mhz, dram_pj)
    metrics = [metric for metric in METRICS if metric in found.cost]
    baseline = rows["whole, default design"]
    show_table(
        ["", *(METRICS[m].words for m in metrics), *(f"{METRICS[m].words} ratio" for m in metrics)],
        [
            [name, *(f"{cost[m]:.4g}" for m in metrics), *(f"{cost[m] / baseline[m]:.3f}" for m in metrics)]
            for name, cost in rows.items()
        ],
    )
    typer.echo(f"{found.design}\nkept tokens per block {counts(found.schedule.merge)}\nwritten to {output}")
    save_json(json, {"model": model, "rows": rows, "design": str(found.design)}, where)


def comparison(
    model: Any, found: CosearchResult, start: Schedule | None, clock_mhz: float, dram_pj: float
) -> dict[str, dict[str, float]]:
    """Rows as in the paper's table: whole, EViT-like and given schedule on the default design, and the result."""
    default = Costs([MacCost.of(model), GemminiCost(c.workload(model, clock_mhz, dram_pj), Design())])
    rows = {"whole, default design": default.price_of(None)}
    try:
        evit = EViT.at(model, EVIT_SHARE * found.cost["gmacs"])
        rows["EViT, default design"] = default.price_of_kept(evit.kept)
    except DiffRateError as error:
        note(str(error))
    if start is not None:
        rows["given schedule, default design"] = default.price_of(start)
    rows["found schedule, default design"] = default.price_of(found.schedule)
    rows["found schedule and design"] = found.cost
    return rows
