"""`diffrate segment train`, `search` and `eval`: Semantic FPN on a backbone, and what compressing it does to mIoU."""

from __future__ import annotations

import json as json_module
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors.torch import load_file

from diffrate.cli import options as o
from diffrate.cli.accelerators import start_accelerator
from diffrate.cli.output import running_command, save_json, show_table
from diffrate.cli.search import show_found
from diffrate.data import LARGEST_BATCH
from diffrate.dense.camvid import CLASSES, load_scenes
from diffrate.dense.choosing import choose_schedule
from diffrate.dense.miou import SegmentationScore, evaluate_segmenter
from diffrate.dense.searching import search_segmenter
from diffrate.dense.segmenter import Segmenter, build_segmenter
from diffrate.dense.training import SegmentationRecipe, train_segmenter
from diffrate.devices import resolve_device
from diffrate.errors import DiffRateError
from diffrate.models import what_does_not_fit
from diffrate.results import check_target, write_results
from diffrate.schedule import Schedule
from diffrate.searching.budget import parse_budgets
from diffrate.training.checkpoint import save_weights

app = typer.Typer(no_args_is_help=True, help="Train, compress and evaluate segmentation models.")
DEFAULT = SegmentationRecipe()
SETTINGS = "segmenter.json"

ScenesDir = Annotated[
    Path, typer.Option("--data-dir", help="Folder with train/, trainannot/, val/, … as CamVid has them.")
]
Trained = Annotated[Path, typer.Option("--from", help="Folder that `segment train` wrote.")]


@app.command("train")
def train_command(
    model: o.ModelName,
    data_dir: ScenesDir,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for weights and results.")],
    checkpoint: o.Checkpoint = None,
    width: Annotated[int, typer.Option(help="Channels of the decoder.", min=16, max=4096)] = 128,
    drop_path: Annotated[
        float, typer.Option(help="Stochastic depth of the backbone.", min=0.0, max=0.99)
    ] = 0.1,
    epochs: Annotated[int, typer.Option(help="Passes over the training scenes.", min=1)] = DEFAULT.epochs,
    batch_size: Annotated[
        int, typer.Option(help="Scenes per step.", min=1, max=LARGEST_BATCH)
    ] = DEFAULT.batch_size,
    lr: Annotated[float, typer.Option(help="Peak learning rate of the decoder.")] = DEFAULT.lr,
    backbone_lr: Annotated[
        float, typer.Option(help="Learning rate of the backbone, as a share of the decoder's.")
    ] = DEFAULT.backbone_lr,
    max_minutes: Annotated[
        float, typer.Option(help="Stop after the epoch that ends within this time.", min=0.0)
    ] = 60,
    seed: Annotated[int, typer.Option(help="Seed of order and augmentation.")] = 0,
    device: o.Device = None,
) -> None:
    """Train Semantic FPN on a timm ViT or CAFormer.

    Example: diffrate segment train --model vit_tiny_patch16_224 --checkpoint tiny.safetensors --data-dir camvid -o seg
    """
    where = resolve_device(device)
    recipe = SegmentationRecipe(
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        backbone_lr=backbone_lr,
        amp=where.type == "cuda",
        seed=seed,
    )
    check_target(output / SETTINGS)
    if (output / SETTINGS).exists():
        raise DiffRateError(f"{output} already holds a segmentation model: choose another folder")
    scenes, validation = load_scenes(data_dir, "train"), load_scenes(data_dir, "val")
    segmenter = build_segmenter(model, len(CLASSES), scenes.size, checkpoint, width, drop_path)
    trained = train_segmenter(segmenter, scenes, validation, where, recipe, max_minutes)
    save_weights(segmenter, output / "weights.safetensors")
    settings = {"model": model, "width": width, "img_size": list(scenes.size), "classes": list(CLASSES)}
    write_results(
        output / SETTINGS,
        shlex.join(["diffrate", *sys.argv[1:]]),
        {
            **settings,
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "recipe": asdict(recipe),
            "gmacs": segmenter.gmacs(),
            "validation": asdict(trained.score),
            "seconds": trained.seconds,
            "epochs": trained.epochs,
            "history": trained.history,
        },
        where,
    )
    typer.echo(
        f"{output}: mIoU {trained.score.miou:.2f} % on {len(validation)} validation scenes after {trained.epochs} "
        f"epochs, {trained.seconds:.0f} seconds, {segmenter.gmacs():.2f} GMACs"
    )


@app.command("search")
def search_command(
    folder: Trained,
    data_dir: ScenesDir,
    budget: Annotated[str, typer.Option(help="70% or 12G, decoder included, or several of these.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for schedule, history and plot.")],
    split: Annotated[str, typer.Option(help="Split to search on; labels are not needed.")] = "train",
    steps: Annotated[
        int | None, typer.Option(help="Steps for the first budget; half of them for each next one.", min=1)
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Scenes a step.", min=1, max=LARGEST_BATCH)] = None,
    held_out: Annotated[float, typer.Option(help="Share of the scenes that decides between answers.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the scenes' order.", min=0)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the search in the folder.")] = False,
    amp: o.Amp = False,
    device: o.Device = None,
) -> None:
    """Learn how many tokens each block of a trained segmentation model may keep.

    Example: diffrate segment search --from seg --data-dir camvid --budget 70% --output run
    """
    accelerator = start_accelerator(resolve_device(device), "bf16" if amp else "no", None, output)
    segmenter, model = load_segmenter(folder), model_name(folder)
    result = search_segmenter(
        segmenter,
        load_scenes(data_dir, split, labelled=False),
        budget,
        steps=steps,
        batch_size=batch_size,
        held_out=held_out,
        seed=seed,
        accelerator=accelerator,
        output=output,
        resume=resume,
        name=model,
        origin={"from": str(folder), "data_dir": str(data_dir), "split": split},
        command=running_command(),
    )
    show_found(result, output)


@app.command("eval")
def eval_command(
    folder: Trained,
    data_dir: ScenesDir,
    split: Annotated[str, typer.Option(help="Split to evaluate.")] = "test",
    budget: Annotated[
        str | None,
        typer.Option(help="Compress to 70%, 12G or several of these; val chooses between simple schedules."),
    ] = None,
    schedule: Annotated[
        list[Path] | None, typer.Option(help="A schedule file instead; may be repeated.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Scenes per batch.", min=1, max=LARGEST_BATCH)] = 16,
    amp: o.Amp = False,
    device: o.Device = None,
    json: o.JsonFile = None,
) -> None:
    """Evaluate a trained segmentation model, whole and compressed without tuning.

    Example: diffrate segment eval --from runs/seg --data-dir camvid --budget 80%,70%
    """
    check_target(json)
    if budget is not None and schedule:
        raise DiffRateError("give either --budget or --schedule")
    where = resolve_device(device)
    segmenter = load_segmenter(folder)
    scenes = load_scenes(data_dir, split)
    whole_gmacs = segmenter.gmacs()
    rows: list[tuple[str, float, SegmentationScore]] = []
    found: dict[str, Any] = {}
    whole = evaluate_segmenter(segmenter, scenes, where, batch_size, amp)
    rows.append(("whole", whole_gmacs, whole))
    schedules = {str(file): Schedule.load(file) for file in schedule or []}
    if budget is not None:
        validation = load_scenes(data_dir, "val")
        for target in parse_budgets(budget, {"gmacs": whole_gmacs}):
            gmacs = target.leading
            chosen = choose_schedule(segmenter, gmacs, validation, where, batch_size, amp)
            name = f"{gmacs / whole_gmacs:.0%} of the GMACs"
            schedules[name] = chosen.schedule
            found[name] = {"validation_miou": chosen.miou, "others": chosen.others}
    for name, each in schedules.items():
        compressed = segmenter.compressed(each)
        result = evaluate_segmenter(compressed, scenes, where, batch_size, amp)
        rows.append((name, compressed.gmacs(), result))
        found.setdefault(name, {})["schedule"] = each.to_dict()
    show_table(
        ["", "mIoU %", "difference", "mAcc %", "GMACs", "images/s"],
        [
            [
                name,
                f"{each.miou:.2f}",
                f"{each.miou - whole.miou:+.2f}" if each is not whole else "",
                f"{each.mean_accuracy:.2f}",
                f"{gmacs:.2f}",
                f"{each.images_per_second:.1f}",
            ]
            for name, gmacs, each in rows
        ],
    )
    results = {name: {**asdict(each), "gmacs": gmacs, **found.get(name, {})} for name, gmacs, each in rows}
    save_json(json, {"from": str(folder), "split": split, "scores": results}, where)


def load_segmenter(folder: Path) -> Segmenter:
    """The model of a folder that `segment train` wrote."""
    try:
        results = _settings(folder)
        segmenter = build_segmenter(
            results["model"], len(results["classes"]), tuple(results["img_size"]), width=results["width"]
        )
        segmenter.load_state_dict(load_file(folder / "weights.safetensors"))
    except Exception as error:  # a damaged file raises whatever its parser raises
        raise DiffRateError(
            f"{folder} holds no model that `segment train` wrote: {what_does_not_fit(error)}"
        ) from error
    return segmenter.eval()


def model_name(folder: Path) -> str:
    """The timm name of its backbone."""
    return str(_settings(folder)["model"])


def _settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json_module.loads((folder / SETTINGS).read_text(encoding="utf-8"))["results"]
    return settings
