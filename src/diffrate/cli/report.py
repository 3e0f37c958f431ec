"""`diffrate report`: one HTML page about a run folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from diffrate.cli import options as o
from diffrate.cli.output import running_command, save_json
from diffrate.data import Images, build_loader, preprocessing
from diffrate.devices import resolve_device
from diffrate.errors import DiffRateError
from diffrate.models import load_model
from diffrate.outputs import class_count
from diffrate.report import Run, measure, read_run, write_report
from diffrate.report.classes import class_names
from diffrate.report.measured import BASELINES, EXPLORED, Shown, is_measured
from diffrate.report.page import NAME
from diffrate.results import check_target

IMAGES = 1000
FROM_RUN = "the search's own where not given"


def report_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder that a search wrote.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help=f"File to write; RUN_DIR/{NAME} without it.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help=f"timm model name; {FROM_RUN}.", rich_help_panel=o.MODEL)
    ] = None,
    checkpoint: o.Checkpoint = None,
    pretrained: o.Pretrained = False,
    data_dir: o.DataDir = None,
    dataset: o.DatasetName = "",
    split: o.Split = None,
    class_map: o.ClassMap = None,
    images: Annotated[
        int, typer.Option(help="Images to measure on, evenly spread.", min=2, rich_help_panel=o.DATA)
    ] = IMAGES,
    batch_size: o.BatchSize = 50,
    workers: o.Workers = 2,
    crop_pct: o.CropPct = None,
    mean: o.Mean = None,
    std: o.Std = None,
    interpolation: o.Interpolation = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods to hold the result against, see `diffrate methods`.", rich_help_panel=o.SCHEDULE
        ),
    ] = ",".join(BASELINES),
    explore: Annotated[
        int, typer.Option(help="Images for the token explorer.", min=1, rich_help_panel=o.DATA)
    ] = EXPLORED,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Measure again what was measured already.", rich_help_panel=o.RUN),
    ] = False,
    device: o.Device = None,
    amp: o.Amp = False,
    amp_dtype: o.AmpDtype = "float16",
    json: o.JsonFile = None,
) -> None:
    """Write one HTML page about a search: what it found, what that does, and every token of a few images.

    With --data-dir, labelled images that the search has not seen, it measures accuracy and speed of the schedules,
    the uncompressed model and other methods, and keeps that in the run folder. Without, the page has what is there.
    Model, weights and normalisation are those of the search, unless given. The page needs no network.

    Example: diffrate report runs/deit --data-dir imagenet --split val
    """
    check_target(json)
    check_target(run_dir / NAME if output is None else output)
    run = read_run(run_dir)
    if data_dir is None and not dataset:
        unused = {"--model": model, "--checkpoint": checkpoint, "--split": split, "--class-map": class_map}
        if given := [name for name, value in unused.items() if value is not None]:
            raise DiffRateError(f"{given[0]} matters only with images: give --data-dir")
    else:
        given_as = {"crop_pct": crop_pct, "mean": mean, "std": std, "interpolation": interpolation}
        asked: dict[str, Any] = {
            "model": model or run.model,
            "checkpoint": _text(checkpoint) or run.origin.get("checkpoint"),
            "pretrained": pretrained or bool(run.origin.get("pretrained")),
            "data_dir": _text(data_dir), "dataset": dataset, "split": split, "class_map": class_map, "images": images,
            "preprocessing": _images_as(run, given_as), "methods": [m.strip() for m in methods.split(",") if m.strip()],
            "explore": explore, "amp": amp_dtype if amp else None,
        }  # fmt: skip
        if fresh or not is_measured(run, asked):
            _measure(run, asked, batch_size, workers, device, amp, amp_dtype)
    target = write_report(run_dir, output, running_command())
    typer.echo(target)
    save_json(json, {"report": str(target), "measured": is_measured(read_run(run_dir))})


def _measure(
    run: Run,
    asked: dict[str, Any],
    batch_size: int,
    workers: int,
    device: str | None,
    amp: bool,
    amp_dtype: str,
) -> None:
    if asked["model"] is None:
        raise DiffRateError("give --model: the run folder does not say for which model it is")
    where, origin = resolve_device(device), run.origin
    size = origin.get("img_size")
    whole = load_model(
        asked["model"], asked["checkpoint"], asked["pretrained"], origin.get("num_classes"),
        None if size is None else (size[0], size[1]), origin.get("model_kwargs"),
    )  # fmt: skip
    images_as = asked["preprocessing"]
    config = preprocessing(whole, **images_as)
    loader = build_loader(
        whole, asked["data_dir"], asked["dataset"], asked["split"], batch_size, workers,
        class_map=asked["class_map"], device=where, most=asked["images"], **images_as,
    )  # fmt: skip
    dataset = getattr(loader, "dataset", None)
    shown = Shown(config["mean"], config["std"], class_names(dataset, class_count(whole)))
    if isinstance(dataset, Images):
        shown = replace(shown, name=dataset.file_name)
    measure(
        run, whole, loader, shown, asked["methods"], asked["explore"], where, amp, amp_dtype, asked, running_command()
    )  # fmt: skip


def _images_as(run: Run, given: dict[str, Any]) -> dict[str, Any]:
    """How images are read: what is given, else as the search did."""
    searched = run.origin.get("preprocessing") or {}
    chosen = {name: searched.get(name) if value is None else value for name, value in given.items()}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
