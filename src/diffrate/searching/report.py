"""The folder and the progress bar of a search: what it writes, what it shows, and how an interrupted one goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import rich.progress as bars
from accelerate import Accelerator
from rich.console import Console

from diffrate.costs.base import METRICS
from diffrate.digest import KEY, is_whole, signed
from diffrate.errors import DiffRateError
from diffrate.run_folder import RunFolder
from diffrate.schedule import Schedule
from diffrate.searching.budget import Budget

if TYPE_CHECKING:
    from diffrate.searching.run import SearchResult

STATE = "state.json"
SAVE_SECONDS = 2.0
T = TypeVar("T")


def schedule_files(schedules: Sequence[Schedule]) -> list[str]:
    """Their names in the folder of a search: schedule.json, or one named by each of several budgets."""
    if len(schedules) == 1:
        return ["schedule.json"]
    return [f"schedule-{schedule.made['budget'].replace(',', '-')}.json" for schedule in schedules]


class SearchFolder(RunFolder):
    """With state.json, all that a resumed search needs, and at the end schedules, history.json and kept.png."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        config: dict[str, Any],
        resume: bool,
        accelerator: Accelerator,
    ) -> None:
        super().__init__(path, config, resume, accelerator, "search")
        self.saved = time.monotonic()

    def load_state(self, kind: type[T]) -> T:
        """The saved state of a search that is resumed, otherwise a new one."""
        values = (self.read(STATE) or {}) if self.resume else {}
        if values and not is_whole(values):
            raise DiffRateError(
                f"the state of the search in {self.path} is damaged, or of another version: "
                "start again in another folder"
            )
        values.pop(KEY, None)
        try:
            return kind(**values)
        except TypeError as error:
            raise DiffRateError(f"{self.path} holds a state that is not this program's: {error}") from error

    def due(self) -> bool:
        """Whether the state is old enough to be worth saving again."""
        return self.path is not None and time.monotonic() - self.saved > SAVE_SECONDS

    def save_state(self, state: dict[str, Any]) -> None:
        self.write(STATE, signed(state))
        self.saved = time.monotonic()

    def finish(self, result: SearchResult, made: dict[str, Any]) -> None:
        """Write what was found, and what `made` it: command, versions, machine. Several budgets get a file each."""
        if self.path is None or not self.main:
            return
        from diffrate.plots import kept_plot

        for file, schedule in zip(schedule_files(result.schedules), result.schedules, strict=True):
            schedule.save(self.path / file)
        self.write(
            "history.json",
            {
                "made": made,
                "seconds": result.seconds,
                "unreadable": result.unreadable,
                "steps": result.history,
            },
        )
        kept_plot(result.history, self.path / "kept.png")


class Progress:
    """One bar a budget: loss, costs against the budget and the schedule so far."""

    def __init__(self, shown: bool) -> None:
        console = Console(stderr=True)
        self.bar = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=20),
            bars.MofNCompleteColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[state]}"),
            console=console,
            disable=not shown or not console.is_terminal,
        )
        self.task: bars.TaskID | None = None

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def start(self, what: Budget | str, steps: int, done: int) -> None:
        self.task = self.bar.add_task(str(what), total=steps, completed=done, state="")

    def advance(self, count: int) -> None:
        assert self.task is not None
        self.bar.update(self.task, advance=count)

    def update(self, entry: dict[str, Any] | None) -> None:
        """One step done, of which `entry` says what is known."""
        assert self.task is not None
        if entry is None:
            self.advance(1)
            return
        kept = " ".join(map(str, entry["kept"]))
        costs = Budget({metric: entry[metric] for metric in METRICS if metric in entry})
        state = f"loss {entry['loss']:.4f}  {costs} of {entry['budget']}  kept {kept}"
        self.bar.update(self.task, advance=1, state=state)
