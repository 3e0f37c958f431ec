"""`diffrate visualize`: pictures of what a schedule merges and prunes in images of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import diffrate
from diffrate.backbones import backbone_of
from diffrate.cli import options as o
from diffrate.cli.output import note, save_json
from diffrate.devices import resolve_device
from diffrate.errors import DiffRateError
from diffrate.models import load_model
from diffrate.pictures import FORMATS
from diffrate.results import check_target
from diffrate.schedule import Schedule
from diffrate.visualizing import visualize

PICTURES = "Pictures"


def visualize_command(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files.")],
    schedule: Annotated[
        str, typer.Option(help="A schedule file, or published:GMACS.", rich_help_panel=o.SCHEDULE)
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="timm model name; the schedule's own where it names one.", rich_help_panel=o.MODEL
        ),
    ] = None,
    checkpoint: o.Checkpoint = None,
    pretrained: o.Pretrained = False,
    num_classes: o.NumClasses = None,
    model_kwargs: o.ModelKwargs = None,
    img_size: o.ImgSize = None,
    crop_pct: o.CropPct = None,
    mean: o.Mean = None,
    std: o.Std = None,
    interpolation: o.Interpolation = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the pictures.", rich_help_panel=PICTURES)
    ] = Path("pictures"),
    formats: Annotated[
        str,
        typer.Option(
            "--format",
            help="png is a strip, gif and webp are animations; several with commas.",
            rich_help_panel=PICTURES,
        ),
    ] = "png,gif",
    blocks: Annotated[
        str | None,
        typer.Option(
            help="Blocks that the strip shows, such as 3,6,9; all without it.", rich_help_panel=PICTURES
        ),
    ] = None,
    device: o.Device = None,
    json: o.JsonFile = None,
) -> None:
    """Show what became of every patch, block by block.

    Patches of one token take its mean colour, with a line around it; pruned patches turn black.

    Example: diffrate visualize cat.jpg --model deit_small_patch16_224 --pretrained --schedule published:2.9
    """
    check_target(json)
    check_target(output / "picture.png")
    wanted = [form.strip().lower() for form in formats.split(",") if form.strip()]
    if unknown := [form for form in wanted if form not in FORMATS]:
        raise DiffRateError(f"--format takes {', '.join(FORMATS)}, not {unknown[0]!r}")
    shown = None if blocks is None else o.read_counts("blocks", blocks)
    where = resolve_device(device)
    name = model or _model_of(schedule)
    size = None if img_size is None else o.read_size(img_size)
    whole = load_model(name, checkpoint, pretrained, num_classes, size, o.read_kwargs(model_kwargs))
    o.note_random_weights(name, checkpoint, pretrained)
    chosen = _fitted(o.read_schedule(schedule, whole, name), backbone_of(whole).layout.tokens)
    compressed = diffrate.compress(whole, chosen).to(where)
    images_as: dict[str, Any] = {"crop_pct": crop_pct, "mean": mean, "std": std}
    written = visualize(
        compressed, images, output, wanted, shown, img_size=size, interpolation=interpolation, **images_as
    )
    for path in written:
        typer.echo(path)
    save_json(
        json,
        {"model": name, "schedule": chosen.to_dict(), "pictures": [str(path) for path in written]},
        where,
    )


def _model_of(schedule: str) -> str:
    named = None if schedule.startswith(o.PUBLISHED) else Schedule.load(schedule).model
    if named is None:
        raise DiffRateError("give --model: the schedule does not say for which model it is")
    return named


def _fitted(schedule: Schedule, tokens: int) -> Schedule:
    """The schedule in proportion, where the model has another number of tokens at this image size."""
    if schedule.tokens != tokens:
        note(
            f"the schedule is for {schedule.tokens} tokens and the model has {tokens}: it runs in proportion"
        )
    return schedule.resized(tokens)
