"""`diffrate export`: a compressed model as a file for another runtime, checked before it is written."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import diffrate
from diffrate.cli import options as o
from diffrate.cli.bench import read_batch_sizes, show_speeds
from diffrate.cli.output import note, save_json, show_effective
from diffrate.compressed import CompressedModel
from diffrate.data import build_loader
from diffrate.errors import DiffRateError
from diffrate.exporting import FORMATS, TOLERANCE, export
from diffrate.exporting.speed import bench_onnx
from diffrate.models import load_model
from diffrate.results import check_target


def export_command(
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="File to write; for safetensors a folder.", rich_help_panel=o.RUN
        ),
    ],
    to: Annotated[str, typer.Option(help=f"Format: {', '.join(FORMATS)}.", rich_help_panel=o.RUN)] = "onnx",
    model: Annotated[str | None, typer.Option(help="timm model name.", rich_help_panel=o.MODEL)] = None,
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from", help="A folder of diffrate.save, instead of --model.", rich_help_panel=o.MODEL
        ),
    ] = None,
    checkpoint: o.Checkpoint = None,
    pretrained: o.Pretrained = False,
    num_classes: o.NumClasses = None,
    model_kwargs: o.ModelKwargs = None,
    img_size: o.ImgSize = None,
    schedule: o.ScheduleText = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Images to compare on with PyTorch; otherwise noise.", rich_help_panel=o.DATA),
    ] = None,
    images: Annotated[
        int, typer.Option(help="How many of them.", min=2, max=10_000, rich_help_panel=o.DATA)
    ] = 16,
    crop_pct: o.CropPct = None,
    mean: o.Mean = None,
    std: o.Std = None,
    interpolation: o.Interpolation = None,
    tolerance: Annotated[
        float, typer.Option(help="Largest difference of any output.", min=0, rich_help_panel=o.RUN)
    ] = TOLERANCE,
    bench: Annotated[
        bool,
        typer.Option(
            "--bench",
            help="Time it in onnxruntime against the whole model, exported too.",
            rich_help_panel=o.RUN,
        ),
    ] = False,
    batch_size: Annotated[
        str, typer.Option(help="Images per batch for --bench; several as 1,8.", rich_help_panel=o.RUN)
    ] = "1,8",
    repeats: Annotated[
        int, typer.Option(help="Timed samples for --bench.", min=4, rich_help_panel=o.RUN)
    ] = 20,
    json: o.JsonFile = None,
) -> None:
    """Export a model under a schedule, for any batch size, and check it against PyTorch before it is written.

    Graphs are fp32, for the CPU, of the plain PyTorch operators. ONNX ones run in onnxruntime (opset 18).

    Example: diffrate export --model deit_small_patch16_224 --pretrained --schedule published:2.9 --output small.onnx
    """
    check_target(json)
    sizes = read_batch_sizes(batch_size)
    if bench and to != "onnx":
        raise DiffRateError("--bench times files of onnxruntime: it needs --to onnx")
    saving: dict[str, Any] | None = None
    preprocessing: dict[str, Any] = {
        "crop_pct": crop_pct,
        "mean": mean,
        "std": std,
        "interpolation": interpolation,
    }
    if from_ is not None:
        given = (model, checkpoint, num_classes, model_kwargs, img_size, schedule)
        if pretrained or any(value is not None for value in given):
            raise DiffRateError("--from brings its own model and schedule: give nothing else of them")
        compressed = diffrate.load(from_)
    elif model is not None:
        size = None if img_size is None else o.read_size(img_size)
        kwargs = o.read_kwargs(model_kwargs)
        whole = load_model(model, checkpoint, pretrained, num_classes, size, kwargs)
        o.note_random_weights(model, checkpoint, pretrained)
        chosen = None if schedule is None else o.read_schedule(schedule, whole, model)
        if chosen is not None:
            show_effective(chosen)
        compressed = diffrate.compress(whole, chosen)
        saving = {"data_config": {name: value for name, value in preprocessing.items() if value is not None}}
        saving |= {"model": model, "model_kwargs": kwargs} if kwargs else {}
    else:
        raise DiffRateError("give a --model, or --from with a folder of diffrate.save")
    seen = None if data_dir is None else _images(compressed, data_dir, images, preprocessing)
    written = export(compressed, output, to, seen, tolerance, saving if to == "safetensors" else None)
    on = "images of noise" if data_dir is None else f"images of {data_dir}"
    typer.echo(
        f"{written.path}: {written.megabytes:.1f} MB, differs from PyTorch by at most "
        f"{written.largest_difference:.2g} on {written.images} {on}"
    )
    if written.ties:
        note(f"on {written.ties} of them two tokens tie, and rounding decides which goes, in PyTorch too")
    rows: list[dict[str, Any]] = []
    name = model or str(from_)
    for speeds in bench_onnx(compressed, output, sizes, repeats, schedule or "compressed") if bench else []:
        show_speeds(name, speeds)
        rows += [{"model": name, **asdict(speed)} for speed in speeds]
    save_json(json, {**asdict(written), "schedule": compressed.schedule.to_dict(), "rows": rows})


def _images(compressed: CompressedModel, data_dir: Path, count: int, preprocessing: dict[str, Any]) -> Tensor:
    """The first images of a folder, as the model wants them."""
    loader = build_loader(
        compressed.original, data_dir, batch_size=1, workers=0, labels=False,
        img_size=compressed.backbone.layout.img_size, **preprocessing,
    )  # fmt: skip
    found = [batch for (batch, _), _ in zip(loader, range(count), strict=False)]
    if len(found) < 2:
        raise DiffRateError(f"the check needs at least two images, and {data_dir} has {len(found)}")
    return torch.cat(found)
