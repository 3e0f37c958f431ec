"""`diffrate methods` and `diffrate compare`: the known methods, and how they fare against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from diffrate.cli import options as o
from diffrate.cli.output import note, origin_line, save_json, show_table
from diffrate.compare import compare as run_compare
from diffrate.comparison_table import as_csv, markdown, remarks, speed_line, table
from diffrate.compressed import CompressedModel
from diffrate.data import build_loader, preprocessing, search_datasets
from diffrate.devices import resolve_device
from diffrate.errors import DiffRateError
from diffrate.methods import METHODS
from diffrate.methods.trained import name_of, read_trained
from diffrate.models import load_model
from diffrate.plots import accuracy_plot
from diffrate.results import check_target
from diffrate.schedule import Schedule, write_text
from diffrate.speed import MODES, check_mode

DRAWN = ("table.md", "table.csv", "plot.png")  # what --output gets beside results.json


def methods(json: o.JsonFile = None) -> None:
    """List the methods that `diffrate compare` can run, and what in them is not as in their papers.

    Example: diffrate methods
    """
    check_target(json)
    listed = [
        {"name": m.name, "what": m.line, "paper": m.paper, "departs": m.departs} for m in METHODS.values()
    ]
    for each in listed:
        typer.echo(f"{each['name']}: {each['what']}")
        departs = f"not as there: {each['departs']}" if each["departs"] else ""
        for line in filter(None, (each["paper"], departs)):
            typer.echo(f"    {line}")
    save_json(json, {"methods": listed})


def compare_command(
    model: o.ModelName,
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
    methods: Annotated[
        str,
        typer.Option(
            help="Methods with commas, see `diffrate methods`. Rows are compared with the first of their budget: a "
            "--schedule or --trained model where one is given, else the first of these that meets the budget.",
            rich_help_panel=o.SCHEDULE,
        ),
    ] = "",
    budget: Annotated[
        str | None,
        typer.Option(
            help="Budgets: 0.8G,60%. Without any, those of the schedules.", rich_help_panel=o.SCHEDULE
        ),
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            help="A schedule to add: [NAME=]FILE or [NAME=]published:GMACS; repeatable. Those of one name are one "
            "line of the plot.",
            rich_help_panel=o.SCHEDULE,
        ),
    ] = None,
    trained: Annotated[
        list[str] | None,
        typer.Option(
            help="A tuned model to add: [NAME=]FOLDER, which `diffrate finetune` wrote; repeatable.",
            rich_help_panel=o.SCHEDULE,
        ),
    ] = None,
    search_dir: Annotated[
        Path | None, typer.Option(help="Folder of images for the method search.", rich_help_panel=o.SCHEDULE)
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of random schedules and searches.", min=0, max=2**31 - 1, rich_help_panel=o.SCHEDULE
        ),
    ] = 0,
    speed: Annotated[
        bool,
        typer.Option(
            help="Also time every row on a batch of the images, as `diffrate bench` does.",
            rich_help_panel=o.RUN,
        ),
    ] = True,
    mode: Annotated[
        str,
        typer.Option(
            help=f"How rows are timed: {', '.join(MODES)}. Small models in large batches wait for launches, unless "
            "they are recorded as a graph.",
            rich_help_panel=o.RUN,
        ),
    ] = "eager",
    device: o.Device = None,
    amp: o.Amp = False,
    amp_dtype: o.AmpDtype = "float16",
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for table.md, table.csv, plot.png and results.json.", rich_help_panel=o.RUN
        ),
    ] = None,
    json: o.JsonFile = None,
) -> None:
    """Compare methods at equal MACs on the same images.

    Every row says how its top-1 (in points) and loss differ from the uncompressed model, with 95 % intervals from
    drawing images anew, and how its top-1 differs from that of the first row of its budget, with McNemar's p. Images/s
    are timed in turns with the uncompressed model, on a batch of images spread over the set.

    Example: diffrate compare --model deit_tiny_patch16_224 --pretrained --data-dir DIR --methods evit,tome --budget 60%
    """
    targets = [json] if output is None else [json, output / "results.json"]
    for target in [*targets, *([] if output is None else [output / name for name in DRAWN])]:
        check_target(target)
    where = resolve_device(device)
    if speed:
        check_mode(mode, where)
    size = None if img_size is None else o.read_size(img_size)
    whole = load_model(model, checkpoint, pretrained, num_classes, size, o.read_kwargs(model_kwargs))
    o.note_random_weights(model, checkpoint, pretrained)
    given: dict[str, list[Schedule]] = {}
    for text in schedule or []:
        name, file = _named(text)
        own = file.removesuffix(".json").rsplit("/", 1)[-1]
        given.setdefault(name or own, []).append(o.read_schedule(file, whole, model))
    tuned: dict[str, list[CompressedModel]] = {}
    for text in trained or []:
        name, folder = _named(text)
        read = read_trained(folder, whole)
        tuned.setdefault(name or name_of(read, folder), []).append(read)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    images: dict[str, Any] = {"img_size": size, "crop_pct": crop_pct, "mean": mean, "std": std}
    images["interpolation"] = interpolation
    to_search = o.dataset_for(model, "", search_dir)
    dataset = o.dataset_for(model, dataset, data_dir)
    same = bool(to_search) and dataset == to_search and split == "search"
    if "search" in names and ((search_dir is None and not to_search) or same):
        raise DiffRateError("the method search needs --search-dir, images apart from those it is judged by")
    loader = build_loader(
        whole, data_dir, dataset, split, batch_size, workers, class_map=class_map, device=where, most=most, **images
    )  # fmt: skip
    compared = run_compare(
        whole,
        loader,
        names,
        budget or (),
        given,
        trained=tuned,
        search_data=search_datasets(whole, search_dir, to_search, **images)
        if search_dir or to_search
        else None,
        device=where,
        amp=amp,
        amp_dtype=amp_dtype,
        seed=seed,
        speed=speed,
        mode=mode,
        batch_size=batch_size,
    )
    for left_out in compared.left_out:
        note(f"left out: {left_out}")
    show_table(*table(compared), text=2)
    typer.echo(f"{compared.whole.images} images on {where}" + speed_line(compared))
    results: dict[str, Any] = {
        "model": model,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "preprocessing": preprocessing(whole, **images),
        "schedules": schedule or [],
        "trained": trained or [],
        "batch_size": batch_size,
        "amp": amp_dtype if amp else None,
        "seed": seed,
        **compared.to_dict(),
    }
    for line in remarks(compared):
        typer.echo(line)
    for target in targets:
        save_json(target, results, where)
    if output is not None:
        table_file, csv_file, plot_file = (output / name for name in DRAWN)
        title = f"{model}, {compared.whole.images:,} images{speed_line(compared)}"
        write_text(table_file, markdown(compared, title, origin_line(where)))
        write_text(csv_file, as_csv(compared))
        accuracy_plot(results, plot_file, title)


def _named(text: str) -> tuple[str, str]:
    """What a row is to be called, and its file: NAME=FILE, or a file alone, and no name."""
    name, equals, file = text.partition("=")
    return (name, file) if equals and "/" not in name and not Path(text).exists() else ("", text)
