"""`diffrate methods` and `diffrate compare`: the known methods, and how they fare against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from diffrate.cli import options as o
from diffrate.cli.output import note, save_json, show_table
from diffrate.compare import as_csv, markdown, operators, speed_line, table
from diffrate.compare import compare as run_compare
from diffrate.data import build_loader, preprocessing, search_datasets
from diffrate.devices import resolve_device
from diffrate.errors import DiffRateError
from diffrate.methods import METHODS
from diffrate.methods.trained import name_of, read_trained
from diffrate.models import load_model
from diffrate.plots import accuracy_plot
from diffrate.results import check_target
from diffrate.schedule import write_text


def methods(json: o.JsonFile = None) -> None:
    """List the methods that `diffrate compare` can run, and what in them is not as in their papers.

    Example: diffrate methods
    """
    check_target(json)
    listed = [
        {"name": m.name, "what": m.line, "paper": m.paper, "departs": m.departs} for m in METHODS.values()
    ]
    columns = ["method", "what it does", "paper", "not as in the paper"]
    show_table(columns, [list(m.values()) for m in listed], text=4)
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
    batch_size: o.BatchSize = 64,
    workers: o.Workers = 2,
    crop_pct: o.CropPct = None,
    mean: o.Mean = None,
    std: o.Std = None,
    interpolation: o.Interpolation = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods with commas, see `diffrate methods`; rows are compared with the first.",
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
            help="A schedule to add: a file, or published:GMACS; repeatable.", rich_help_panel=o.SCHEDULE
        ),
    ] = None,
    trained: Annotated[
        list[Path] | None,
        typer.Option(
            help="A tuned model to add: a folder that `diffrate finetune` wrote; repeatable.",
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
    for target in targets:
        check_target(target)
    where = resolve_device(device)
    size = None if img_size is None else o.read_size(img_size)
    whole = load_model(model, checkpoint, pretrained, num_classes, size, o.read_kwargs(model_kwargs))
    given = {
        text.removesuffix(".json").rsplit("/", 1)[-1]: o.read_schedule(text, whole, model)
        for text in schedule or []
    }
    tuned = {}
    for folder in trained or []:
        read = read_trained(folder, whole)
        name = name_of(read, folder)
        tuned[name if name not in tuned else str(folder)] = read
    names = [name.strip() for name in methods.split(",") if name.strip()]
    images: dict[str, Any] = {"img_size": size, "crop_pct": crop_pct, "mean": mean, "std": std}
    images["interpolation"] = interpolation
    if "search" in names and search_dir is None:
        raise DiffRateError("the method search needs --search-dir, images apart from those it is judged by")
    loader = build_loader(
        whole, data_dir, dataset, split, batch_size, workers, class_map=class_map, device=where, **images
    )
    compared = run_compare(
        whole,
        loader,
        names,
        budget or (),
        given,
        trained=tuned,
        search_data=None if search_dir is None else search_datasets(whole, search_dir, **images),
        device=where,
        amp=amp,
        amp_dtype=amp_dtype,
        seed=seed,
        speed=speed,
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
        "batch_size": batch_size,
        "amp": amp_dtype if amp else None,
        "seed": seed,
        **compared.to_dict(),
    }
    for line in operators(results["rows"]):
        typer.echo(line)
    for target in targets:
        save_json(target, results, where)
    if output is not None:
        write_text(output / "table.md", markdown(compared))
        write_text(output / "table.csv", as_csv(compared))
        accuracy_plot(compared, output / "plot.png")
