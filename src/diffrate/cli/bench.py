"""`diffrate bench`: what a search step costs on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from diffrate.bench import StepTime, bench_search
from diffrate.cli import options as o
from diffrate.cli.output import save_json, show_table
from diffrate.devices import resolve_device
from diffrate.errors import DiffRateError
from diffrate.models import load_model
from diffrate.results import check_target


def bench_command(
    model: Annotated[
        list[str], typer.Option("--model", help="timm model name; may be repeated.", rich_help_panel=o.MODEL)
    ],
    search: Annotated[
        bool, typer.Option("--search", help="Time the steps of a search.", rich_help_panel=o.RUN)
    ] = False,
    batch_size: o.BatchSize = 256,
    repeats: Annotated[
        int, typer.Option(help="Timed steps of each kind.", min=4, rich_help_panel=o.RUN)
    ] = 20,
    device: o.Device = None,
    amp: o.Amp = False,
    amp_dtype: o.AmpDtype = "float16",
    json: o.JsonFile = None,
) -> None:
    """Time search steps against a plain forward and backward pass, on random images and weights.

    Example: diffrate bench --search --model deit_small_patch16_224 --batch-size 256 --amp
    """
    check_target(json)
    if not search:
        raise DiffRateError("say what to time: --search for the steps of a search")
    where = resolve_device(device)
    results = {
        name: bench_search(
            load_model(name), batch_size, device=where, amp=amp, amp_dtype=amp_dtype, repeats=repeats
        )
        for name in model
    }
    columns = ["model", "step", "ms", "± ms", "x plain", "peak GiB"]
    show_table(
        columns, [[name, *_cells(t, times[0])] for name, times in results.items() for t in times], text=2
    )
    rows = {name: [asdict(t) for t in times] for name, times in results.items()}
    save_json(json, {"batch_size": batch_size, "amp": amp_dtype if amp else None, "steps": rows}, where)


def _cells(t: StepTime, plain: StepTime) -> list[str]:
    memory = "" if t.peak_gib is None else f"{t.peak_gib:.2f}"
    return [t.name, f"{t.ms:.1f}", f"{t.spread_ms:.1f}", f"{t.ms / plain.ms:.2f}", memory]
