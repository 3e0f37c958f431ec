"""`diffrate eval`: accuracy, loss, cost and speed of a model, compressed or not."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

import diffrate
from diffrate.cli import options as o
from diffrate.cli.flags import with_flags
from diffrate.cli.output import save_json, show_effective, show_table
from diffrate.data import build_loader, preprocessing
from diffrate.devices import resolve_device
from diffrate.errors import DiffRateError
from diffrate.evaluate import Comparison, Evaluation, evaluate
from diffrate.methods.trained import read_trained
from diffrate.models import load_model
from diffrate.results import check_target

NUMBERS = ("top1", "top5", "loss", "images", "images_per_second")


@with_flags("removal", o.REMOVAL)
def eval_command(
    model: o.ModelName,
    removal: dict[str, Any],
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
    batch_size: o.BatchSize = 64,
    workers: o.Workers = 2,
    crop_pct: o.CropPct = None,
    mean: o.Mean = None,
    std: o.Std = None,
    interpolation: o.Interpolation = None,
    schedule: o.ScheduleText = None,
    trained: o.Trained = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Run the uncompressed model on the same batches and report the paired difference.",
            rich_help_panel=o.SCHEDULE,
        ),
    ] = False,
    device: o.Device = None,
    amp: o.Amp = False,
    amp_dtype: o.AmpDtype = "float16",
    json: o.JsonFile = None,
) -> None:
    """Evaluate a model: top-1, top-5, loss, GMACs and images per second.

    With --schedule the compressed model, with --trained one that `diffrate finetune` tuned; with --compare also how it
    differs from the whole one, image by image.

    Example: diffrate eval --model deit_tiny_patch16_224 --pretrained --data-dir imagenet --schedule published:0.8
    """
    check_target(json)
    if schedule is not None and trained is not None:
        raise DiffRateError("a --trained model brings its own schedule or method: leave --schedule out")
    if compare and schedule is None and trained is None:
        raise DiffRateError("--compare compares with the uncompressed model, so it needs a --schedule")
    if schedule is None and removal:
        raise DiffRateError("how tokens are removed matters only with a --schedule")
    where = resolve_device(device)
    size = None if img_size is None else o.read_size(img_size)
    whole = load_model(model, checkpoint, pretrained, num_classes, size, o.read_kwargs(model_kwargs))
    if trained is None:
        o.note_random_weights(model, checkpoint, pretrained)
    chosen = None if schedule is None else o.read_schedule(schedule, whole, model)
    tested = (
        read_trained(trained, whole)
        if trained is not None
        else diffrate.compress(whole, chosen, **o.operator_changes(removal))
    )
    images: dict[str, Any] = {"img_size": size, "crop_pct": crop_pct, "mean": mean, "std": std}
    images["interpolation"] = interpolation
    dataset = o.dataset_for(model, dataset, data_dir)
    loader = build_loader(
        whole, data_dir, dataset, split, batch_size, workers, class_map=class_map, device=where, most=most, **images
    )  # fmt: skip
    if chosen is not None:
        show_effective(chosen)
    result = evaluate(tested, loader, where, amp, amp_dtype, compare=whole if compare else None)

    gmacs = {"compressed": diffrate.gmacs(tested), "uncompressed": diffrate.gmacs(whole)}
    rows = [(result, "uncompressed" if chosen is None and trained is None else "compressed")]
    if result.reference is not None:
        rows.insert(0, (result.reference, "uncompressed"))
    show_table(
        ["", "top-1 %", "top-5 %", "loss", "GMACs", "images/s"],
        [[name, *_cells(each, gmacs[name])] for each, name in rows],
    )
    typer.echo(f"{result.images} images on {where}")
    if result.comparison is not None:
        typer.echo(_sentence(result.comparison))
    save_json(
        json,
        {
            "model": model,
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "schedule": None if chosen is None else chosen.to_dict(),
            "operator": None if chosen is None else asdict(tested.operator),
            "trained": None if trained is None else {"folder": str(trained), **tested.settings()},
            "preprocessing": preprocessing(whole, **images),
            "batch_size": batch_size,
            "amp": amp_dtype if amp else None,
            **{name: {**_numbers(each), "gmacs": gmacs[name]} for each, name in rows},
            "comparison": None if result.comparison is None else asdict(result.comparison),
        },
        where,
    )


def _numbers(result: Evaluation) -> dict[str, float]:
    return {name: getattr(result, name) for name in NUMBERS}


def _cells(result: Evaluation, gmacs: float) -> list[str]:
    numbers = [f"{result.top1:.2f}", f"{result.top5:.2f}", f"{result.loss:.4f}"]
    return [*numbers, f"{gmacs:.3f}", f"{result.images_per_second:.1f}"]


def _sentence(c: Comparison) -> str:
    return (
        f"difference: top-1 {c.top1_difference:+.2f} ± {c.top1_standard_error:.2f} points (McNemar's p "
        f"{c.mcnemar_p:.2g}), loss {c.loss_difference:+.4f} ± {c.loss_standard_error:.4f} (standard errors, paired); "
        f"{c.gained} images gained, {c.lost} lost, {c.changed} of {c.images} predictions changed"
    )
