"""`diffrate bench`: how fast models are under schedules on this machine, and what a search step costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from diffrate import kernels
from diffrate.bench import StepTime, bench_search
from diffrate.cli import options as o
from diffrate.cli.output import save_json, show_table
from diffrate.devices import resolve_device
from diffrate.errors import DiffRateError
from diffrate.models import load_model
from diffrate.plots import check_format, speed_plot
from diffrate.results import check_target
from diffrate.schedule import Schedule
from diffrate.speed import DTYPES, MODES, UNCOMPRESSED, Speed, bench, entrants, profile


def bench_command(
    model: Annotated[
        list[str], typer.Option("--model", help="timm model name; may be repeated.", rich_help_panel=o.MODEL)
    ],
    num_classes: o.NumClasses = None,
    model_kwargs: o.ModelKwargs = None,
    img_size: o.ImgSize = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            "--schedule",
            help="A schedule file, or published:GMACS; may be repeated.",
            rich_help_panel=o.SCHEDULE,
        ),
    ] = None,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines",
            help="Also time ToMe and EViT at the same MACs; on a GPU in half precision also the uncompressed model and "
            "the oracle slice with their patches cut by a product, as compressed models do it there, and the "
            "uncompressed model with all of their kernels.",
            rich_help_panel=o.SCHEDULE,
        ),
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Time the steps of a search instead.", rich_help_panel=o.RUN)
    ] = False,
    batch_size: Annotated[
        str | None,
        typer.Option(
            help="Images per batch; several as 1,16,256. [default: 64; 256 with --search]",
            rich_help_panel=o.DATA,
        ),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            "--mode",
            help=f"{', '.join(MODES)}; may be repeated. [default: eager]",
            rich_help_panel=o.RUN,
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help=f"Type of weights and images: {', '.join(DTYPES)}.", rich_help_panel=o.RUN)
    ] = "float32",
    path: Annotated[
        str,
        typer.Option("--kernels", help=f"Which kernels: {', '.join(kernels.PATHS)}.", rich_help_panel=o.RUN),
    ] = "auto",
    repeats: Annotated[
        int, typer.Option(help="Timed samples of each kind.", min=4, rich_help_panel=o.RUN)
    ] = 20,
    show_profile: Annotated[
        bool, typer.Option("--profile", help="Also show where the time goes.", rich_help_panel=o.RUN)
    ] = False,
    accuracy: Annotated[
        list[str] | None,
        typer.Option(
            help="ROW=PERCENT, with the row's name as the table shows it, for --plot; may be repeated.",
            rich_help_panel=o.RUN,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw images/s against the accuracies given.", rich_help_panel=o.RUN),
    ] = None,
    device: o.Device = None,
    amp: o.Amp = False,
    amp_dtype: o.AmpDtype = "float16",
    json: o.JsonFile = None,
) -> None:
    """Time models on random images and weights: uncompressed, under schedules, and their ceiling, the oracle slice.

    The oracle slice is the same model that keeps the first tokens of each block, whatever they are. With --search,
    search steps against a plain forward and backward pass (--amp and --amp-dtype are for that alone).

    Example: diffrate bench --model deit_base_patch16_224 --schedule published:11.5 --dtype float16 --mode compiled
    """
    check_target(json)
    check_target(plot)
    if plot is not None:
        check_format(plot)
    sizes = read_batch_sizes(batch_size or ("256" if search else "64"))
    where = resolve_device(device)
    if search:
        if schedule or mode or show_profile or plot or len(sizes) > 1:
            raise DiffRateError(
                "--search times steps: it takes no schedule, mode, profile, plot or list of batches"
            )
        _search_steps(model, sizes[0], where, amp, amp_dtype, repeats, json)
        return
    if amp:
        raise DiffRateError("--amp is for --search; say --dtype float16 or bfloat16")
    given = read_accuracies(accuracy)
    if plot is not None and len(given) < 1:
        raise DiffRateError("--plot draws throughput against accuracy: give some --accuracy ROW=PERCENT")
    size = None if img_size is None else o.read_size(img_size)
    kwargs = o.read_kwargs(model_kwargs)
    built = {name: load_model(name, None, False, num_classes, size, kwargs) for name in model}
    schedules = {
        name: {text: o.read_schedule(text, whole, name) for text in schedule or []}
        for name, whole in built.items()
    }
    products = baselines and where.type == "cuda" and dtype != "float32" and path != "plain"
    expected = [
        row.name for name in model for row in entrants(built[name], schedules[name], baselines, products)
    ]
    if unknown := set(given) - set(expected):
        names = ", ".join(dict.fromkeys(expected))
        raise DiffRateError(f"there is no row {', '.join(sorted(unknown))} for an accuracy; rows are {names}")
    rows: list[dict[str, Any]] = []
    profiles: list[dict[str, Any]] = []
    for name, whole in built.items():
        options = (sizes, where, dtype, mode or ["eager"], baselines, repeats, path, products)
        fitted: dict[int, None] = {}  # batch sizes for which there was memory
        for speeds in bench(whole, schedules[name], *options):
            fitted[speeds[0].batch_size] = None
            rows += [{"model": name, **asdict(speed)} for speed in speeds]
            show_speeds(name, speeds)
        if show_profile:
            profiles += _profiles(name, whole, schedules[name], list(fitted), where, dtype, path)
    for row in rows:
        row["accuracy"] = given.get(row["name"])
    if plot is not None:
        speed_plot(rows, plot)
    results = {"kernels": path, "repeats": repeats, "rows": rows, "profiles": profiles}
    save_json(json, results, where)


def show_speeds(model: str, speeds: Sequence[Speed]) -> None:
    """One table: the rows of one model, batch size and mode."""
    first = speeds[0]
    typer.echo(f"{model}, batch {first.batch_size}, {first.dtype}, {first.mode}")
    columns = [
        "",
        "GMACs",
        "images/s",
        "ms",
        "± ms",
        "peak GiB",
        "x uncompressed",
        "x oracle",
        "of MACs saved",
    ]
    show_table(columns, [_speed_cells(speed) for speed in speeds])


def _speed_cells(s: Speed) -> list[str]:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        s.name,
        f"{s.gmacs:.3f}",
        f"{s.images_per_second:.1f}",
        f"{s.ms:.2f}",
        f"{s.spread_ms:.2f}",
        shown(s.peak_gib, ".2f"),
        shown(s.of_uncompressed, ".3f"),
        shown(s.of_oracle, ".3f"),
        shown(s.saved_share, ".0%"),
    ]


def _profiles(
    name: str,
    built: nn.Module,
    schedules: dict[str, Schedule],
    sizes: Sequence[int],
    where: torch.device,
    dtype: str,
    path: str,
) -> list[dict[str, Any]]:
    """Where the time goes in eager mode, for the uncompressed model and every schedule, at every batch size."""
    found = []
    for size in sizes:
        columns = {
            label: profile(built, each, size, where, dtype, path)
            for label, each in {UNCOMPRESSED: None, **schedules}.items()
        }
        typer.echo(f"{name}, batch {size}, {dtype}: milliseconds in each step of an eager forward pass")
        steps = list(next(iter(columns.values())))
        show_table(
            ["", *columns], [[step, *(f"{times[step]:.2f}" for times in columns.values())] for step in steps]
        )
        found += [{"model": name, "name": label, "batch_size": size, "ms": t} for label, t in columns.items()]
    return found


def read_batch_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise DiffRateError(f"--batch-size takes numbers such as 1,16,256, not {text!r}") from None
    if min(sizes) < 1:
        raise DiffRateError(f"a batch holds at least one image, not {min(sizes)}")
    return sizes


def read_accuracies(texts: list[str] | None) -> dict[str, float]:
    read = {}
    for text in texts or []:
        name, _, percent = text.rpartition("=")
        try:
            read[name] = float(percent)
        except ValueError:
            raise DiffRateError(f"--accuracy takes ROW=PERCENT, not {text!r}") from None
    return read


def _search_steps(
    models: list[str],
    batch_size: int,
    where: torch.device,
    amp: bool,
    amp_dtype: str,
    repeats: int,
    json: Path | None,
) -> None:
    results = {
        name: bench_search(
            load_model(name), batch_size, device=where, amp=amp, amp_dtype=amp_dtype, repeats=repeats
        )
        for name in models
    }
    columns = ["model", "step", "ms", "± ms", "x plain", "peak GiB"]
    show_table(
        columns, [[name, *_cells(t, times[0])] for name, times in results.items() for t in times], text=2
    )
    rows = {name: [asdict(t) for t in times] for name, times in results.items()}
    size = min(t.batch_size for times in results.values() for t in times)
    save_json(json, {"batch_size": size, "amp": amp_dtype if amp else None, "steps": rows}, where)


def _cells(t: StepTime, plain: StepTime) -> list[str]:
    memory = "" if t.peak_gib is None else f"{t.peak_gib:.2f}"
    return [t.name, f"{t.ms:.1f}", f"{t.spread_ms:.1f}", f"{t.ms / plain.ms:.2f}", memory]
