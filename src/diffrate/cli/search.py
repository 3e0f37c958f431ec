"""`diffrate search`: learn a schedule on a folder of images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from timm.data import Mixup

from diffrate.cli import costs as c
from diffrate.cli import options as o
from diffrate.cli.accelerators import start_accelerator, start_tracker
from diffrate.cli.flags import with_flags
from diffrate.cli.output import counts, note, running_command, save_json, show_table
from diffrate.costs.base import METRICS
from diffrate.data import LARGEST_BATCH, preprocessing, search_datasets
from diffrate.devices import resolve_device
from diffrate.errors import DiffRateError
from diffrate.models import load_model
from diffrate.results import check_target
from diffrate.searching import SearchResult, search
from diffrate.searching.images import MOST_HELD_OUT
from diffrate.searching.report import schedule_files
from diffrate.searching.run import RECIPES

SEARCH = "Search"


@with_flags("removal", o.OPERATOR)
def search_command(
    model: o.ModelName,
    removal: dict[str, Any],
    budget: Annotated[
        str,
        typer.Option(
            help="0.8G (GMACs), 60%, 2.1ms, 90mW or 5mJ; different ones are met together, several of one kind are "
            "several searches: 1.0G,0.9G,0.8G.",
            rich_help_panel=SEARCH,
        ),
    ],
    output: Annotated[
        Path, typer.Option(help="Folder for schedule, history and plot.", rich_help_panel=SEARCH)
    ],
    checkpoint: o.Checkpoint = None,
    pretrained: o.Pretrained = False,
    num_classes: o.NumClasses = None,
    model_kwargs: o.ModelKwargs = None,
    img_size: o.ImgSize = None,
    data_dir: o.DataDir = None,
    dataset: o.DatasetName = "",
    split: o.Split = None,
    class_map: o.ClassMap = None,
    most: o.MostImages = None,
    workers: o.Workers = 2,
    crop_pct: o.CropPct = None,
    mean: o.Mean = None,
    std: o.Std = None,
    interpolation: o.Interpolation = None,
    profile_table: c.ProfileTable = None,
    profile_batch_size: c.ProfileBatchSize = None,
    profile_dtype: c.ProfileDtype = None,
    any_table: c.AnyTable = False,
    hardware: c.Hardware = None,
    clock_mhz: c.ClockMhz = c.CLOCK,
    dram_pj: c.DramPj = 0.0,
    recipe: Annotated[
        str,
        typer.Option(
            help=f"{' or '.join(RECIPES)}: fast needs no labels and takes minutes; paper is the published method.",
            rich_help_panel=SEARCH,
        ),
    ] = "fast",
    steps: Annotated[
        int | None,
        typer.Option(
            help="Steps for the first budget; half of them for each next one.", min=1, rich_help_panel=SEARCH
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Images a step, over all processes.", min=1, max=LARGEST_BATCH, rich_help_panel=SEARCH
        ),
    ] = None,
    held_out: Annotated[
        float,
        typer.Option(
            help=f"Share of the images that decides when to stop, at most {MOST_HELD_OUT:,}.",
            rich_help_panel=SEARCH,
        ),
    ] = 0.2,
    seed: Annotated[
        int, typer.Option(help="Seed of the images' order.", min=0, max=2**31 - 1, rich_help_panel=SEARCH)
    ] = 0,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the search in the output folder.", rich_help_panel=SEARCH),
    ] = False,
    tracker: Annotated[
        str | None,
        typer.Option(help="An accelerate tracker, such as tensorboard or wandb.", rich_help_panel=SEARCH),
    ] = None,
    device: o.Device = None,
    amp: Annotated[
        bool | None,
        typer.Option(
            "--amp/--no-amp", help="Mixed precision; on a GPU unless told not to.", rich_help_panel=o.RUN
        ),
    ] = None,
    amp_dtype: o.AmpDtype = "float16",
    json: o.JsonFile = None,
) -> None:
    """Learn how many tokens each block may keep within a budget.

    About 1,000 images are enough, with or without classes. Several processes: accelerate launch -m diffrate search …

    How tokens are removed is the recipe's choice, unless flags say it: with --operator paper the fast recipe searches
    for the published one. Flags fix all of it, the floor too, which held-out images choose otherwise.

    A budget in ms needs a table of `diffrate profile` for this machine, or --hardware; mW and mJ need --hardware.

    Example: diffrate search --model deit_small_patch16_224 --data-dir images --budget 60% --output runs/deit
    """
    check_target(json)
    if recipe not in RECIPES:
        raise DiffRateError(f"--recipe is {' or '.join(RECIPES)}, not {recipe!r}")
    operator = o.OPERATORS[recipe].changed(**o.operator_changes(removal)) if removal else None
    where = resolve_device(device)
    accelerator = start_accelerator(where, _precision(where, amp, amp_dtype), tracker, output)
    size = None if img_size is None else o.read_size(img_size)
    kwargs = o.read_kwargs(model_kwargs)
    if recipe == "paper":
        kwargs = {"drop_path_rate": 0.1, **kwargs}
    torch.manual_seed(
        seed
    )  # for weights that are not given: every process, and a resumed run, must have the same
    whole = load_model(model, checkpoint, pretrained, num_classes, size, kwargs)
    if accelerator.is_main_process:
        o.note_random_weights(model, checkpoint, pretrained)
    costs = c.read_costs(
        whole, model, device, profile_table, profile_batch_size, profile_dtype, any_table, hardware, clock_mhz, dram_pj,
        operator or o.OPERATORS[recipe],
    )  # fmt: skip
    dataset = o.dataset_for(model, dataset, data_dir)
    data = search_datasets(
        whole, data_dir, dataset, split, labels=recipe == "paper", heavy=recipe == "paper", img_size=size,
        crop_pct=crop_pct, mean=mean, std=std, interpolation=interpolation, class_map=class_map,
        most=most,
    )  # fmt: skip
    mix: Any = None
    if recipe == "paper":
        mix = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=whole.num_classes)
    origin = {
        "checkpoint": None if checkpoint is None else str(checkpoint), "pretrained": pretrained, "model_kwargs": kwargs,
        "num_classes": num_classes, "img_size": None if size is None else list(size),
        "data_dir": None if data_dir is None else str(data_dir), "dataset": dataset, "split": split,
        "preprocessing": preprocessing(whole, size, crop_pct, mean, std, interpolation),
    }  # fmt: skip
    start_tracker(accelerator, tracker, {"model": model, "budget": budget, "recipe": recipe, "seed": seed})
    result = search(
        whole, data, budget, recipe=recipe, costs=costs, operator=operator, steps=steps, batch_size=batch_size,
        held_out=held_out, mix=mix, seed=seed, workers=workers, accelerator=accelerator, output=output, resume=resume,
        name=model, origin=origin, command=running_command(),
    )  # fmt: skip
    accelerator.end_training()
    if accelerator.is_main_process:
        show_found(result, output)
        schedules = [schedule.to_dict() for schedule in result.schedules]
        save_json(
            json,
            {"seconds": result.seconds, "unreadable": result.unreadable, "schedules": schedules},
            accelerator.device,
        )


def _precision(device: torch.device, amp: bool | None, amp_dtype: str) -> str:
    names = {"float16": "fp16", "bfloat16": "bf16"}
    mixed = device.type != "cpu" if amp is None else amp
    return names[amp_dtype] if mixed else "no"


def show_found(result: SearchResult, output: Path) -> None:
    """A line a budget: what was found, and what it costs."""
    metrics = [metric for metric in METRICS if metric in result.schedule.cost]
    splits = result.schedule.operator.splits
    show_table(
        [
            "budget",
            *(METRICS[m].words for m in metrics),
            "divergence",
            "best step",
            "kept tokens per block",
            *["merged tokens per block"] * splits,
        ],
        [
            [
                s.made["budget"],
                *(f"{s.cost[metric]:.4g}" for metric in metrics),
                f"{s.made['held_out_divergence']:.4f}",
                s.made["best_step"],
                counts(s.merge),
                *[counts([after - n for after, n in zip(s.prune, s.merge, strict=True)])] * splits,
            ]
            for s in result.schedules
        ],
    )
    if result.unreadable:
        note(
            f"{len(result.unreadable)} images could not be read and were skipped: {'; '.join(result.unreadable[:5])}"
        )
    files = ", ".join(schedule_files(result.schedules))
    typer.echo(f"{result.seconds:.1f} s; written to {output}: {files}")
