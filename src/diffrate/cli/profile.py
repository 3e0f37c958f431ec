"""`diffrate profile`: a table of what a model's parts take on this machine, for budgets in milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from diffrate.backbones import backbone_of
from diffrate.cli import options as o
from diffrate.cli.flags import with_flags
from diffrate.cli.output import counts, note, save_json, show_table
from diffrate.compressed import checked_operator
from diffrate.costs import LatencyTable
from diffrate.devices import device_name, resolve_device
from diffrate.errors import DiffRateError
from diffrate.models import load_model
from diffrate.profiling import check_mode, held_against, profile
from diffrate.results import check_target
from diffrate.searching import fast

DRIFT = 0.1  # of the whole model's time, from which on a table is said to be old
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@with_flags("removal", o.OPERATOR)
def profile_command(
    model: o.ModelName,
    removal: dict[str, Any],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Table to write.", rich_help_panel=o.RUN)
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            help="Time --schedule against this table, instead of making one.", rich_help_panel=o.RUN
        ),
    ] = None,
    schedule: o.ScheduleText = None,
    num_classes: o.NumClasses = None,
    model_kwargs: o.ModelKwargs = None,
    img_size: o.ImgSize = None,
    batch_size: o.BatchSize = 64,
    dtype: Annotated[
        str, typer.Option(help=f"Number type: {', '.join(DTYPES)}.", rich_help_panel=o.RUN)
    ] = "float32",
    mode: Annotated[
        str,
        typer.Option(
            help="eager, or graph: all recorded as CUDA graphs, as the model will be served.",
            rich_help_panel=o.RUN,
        ),
    ] = "eager",
    repeats: Annotated[
        int, typer.Option(help="Timed runs of each part; the median counts.", min=3, rich_help_panel=o.RUN)
    ] = 30,
    device: o.Device = None,
    json: o.JsonFile = None,
) -> None:
    """Measure what a model's parts take on this machine, for budgets in milliseconds.

    The table holds for this model, device, batch size, number type, mode and way of removing tokens, which is that of
    `diffrate search` unless flags say another; times are those of a batch. It ends with a check: whole models under
    several schedules, as the table predicts them and as they are. With --table, a schedule and the whole model are
    timed and held against a table that exists.

    Example: diffrate profile --model vit_tiny_patch16_224 --batch-size 8 --device cpu --output table.json
    """
    check_target(json)
    if (output is None) == (table is None):
        raise DiffRateError("give either --output for a new table, or --table and --schedule to check one")
    if (schedule is None) != (table is None):
        raise DiffRateError("--schedule and --table go together: a schedule is timed against a table")
    if table is not None and removal:
        raise DiffRateError("flags of how tokens are removed go with a new table: a schedule has its own")
    if dtype not in DTYPES:
        raise DiffRateError(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    check_target(output)
    where = resolve_device(device)
    check_mode(mode, where)
    size = None if img_size is None else o.read_size(img_size)
    whole = load_model(
        model, num_classes=num_classes, img_size=size, model_kwargs=o.read_kwargs(model_kwargs)
    )
    layout = backbone_of(whole).layout
    if table is not None and schedule is not None:
        known = LatencyTable.load(table)
        chosen = o.read_schedule(schedule, whole, model)
        removed_by = checked_operator(chosen.operator, layout)
        known.check(layout, model, device_name(where), batch_size, dtype, mode, removed_by)
        rows = held_against(known, whole.to(where, DTYPES[dtype]), [None, chosen], repeats)
        drift = rows[0]["measured_ms"] / rows[0]["predicted_ms"]
        if abs(drift - 1) > DRIFT:
            note(
                f"the whole model takes {drift:.2f} times what it took when the table was made: this machine or its "
                "software runs at another speed now, and needs a new table"
            )
    else:
        assert output is not None
        made = profile(
            whole.to(dtype=DTYPES[dtype]),
            batch_size,
            device=where,
            operator=fast.OPERATOR.changed(**o.operator_changes(removal)),
            repeats=repeats,
            mode=mode,
            name=model,
            say=note,
        )
        made.save(output)
        rows = made.checks
    show_table(
        ["kept tokens per block", "predicted ms", "measured ms", "error"],
        [
            [
                counts(row["kept"]),
                f"{row['predicted_ms']:.3f}",
                f"{row['measured_ms']:.3f}",
                f"{row['predicted_ms'] / row['measured_ms'] - 1:+.1%}",
            ]
            for row in rows
        ],
    )
    worst = max(abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in rows)
    typer.echo(f"largest error {worst:.1%}, ms of a batch of {batch_size} on {device_name(where)}, {dtype}")
    save_json(
        json, {"model": model, "batch_size": batch_size, "dtype": dtype, "mode": mode, "checks": rows}, where
    )
