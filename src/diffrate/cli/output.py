"""What commands print, and the one way in which they write a results file."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from diffrate.results import in_words, origin, write_results
from diffrate.schedule import Schedule


def note(text: str) -> None:
    """A remark beside the result: on stderr, so that stdout holds the result alone."""
    typer.echo(f"Note: {text}", err=True)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]], text: int = 1) -> None:
    """A table whose first `text` columns are text and whose others are numbers."""
    table = Table(box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < text else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    # Without a terminal rich would fold everything at 80 columns.
    console = Console(markup=False) if sys.stdout.isatty() else Console(width=1000, markup=False)
    console.print(table)


def show_effective(schedule: Schedule) -> None:
    """Say so when a schedule's counts rise from block to block, and what runs in its place."""
    if schedule.is_monotone:
        return
    effective = schedule.effective
    note(
        "the schedule's counts rise from block to block; what runs is the effective schedule, their running minimum:"
    )
    typer.echo(f"  prune {counts(effective.prune)}\n  merge {counts(effective.merge)}", err=True)


def counts(values: Iterable[int]) -> str:
    return ",".join(map(str, values))


def running_command() -> str:
    """The command line, as a shell would take it again."""
    return shlex.join(["diffrate", *sys.argv[1:]])


def origin_line(device: torch.device) -> str:
    """What made a table, as a line of Markdown below it: command, machine, commit and date."""
    made = origin(running_command(), device)
    return f"`{made['command']}`, {in_words(made)}"


def save_json(path: Path | None, results: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Write the results of the running command where `--json` says, if it was given."""
    if path is not None:
        write_results(path, running_command(), results, device)
