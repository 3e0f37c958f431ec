"""What a training shows: a bar with images per second and the time that is left, and a line an epoch."""

from __future__ import annotations

from typing import Any

import rich.progress as bars
from rich.console import Console

from diffrate.training.recipe import Recipe


class Bar:
    """The bar is for terminals; the lines are for logs too.

    steps, done  of an epoch, and those that a resumed run has behind it, which tell nothing of its pace.
    """

    def __init__(self, shown: bool, recipe: Recipe, steps: int, done: int = 0) -> None:
        self.recipe, self.steps = recipe, steps
        console = Console(quiet=not shown, stderr=True)
        self.bar = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[pace]}"),
            bars.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not shown or not console.is_terminal,
        )
        self.console = self.bar.console
        self.task = self.bar.add_task("training", total=recipe.epochs * steps, completed=done, pace="")

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.stop()

    def advance(self) -> None:
        speed = self.bar.tasks[0].speed
        pace = "" if speed is None else f"{speed * self.recipe.batch_size:,.0f} images/s"
        self.bar.update(self.task, advance=1, pace=pace)

    def epoch(self, epoch: int, history: list[dict[str, float]], rate: float) -> None:
        """One line; the quickest epoch tells how long the others will take, because the first one also compiles."""
        last = history[-1]
        left = min(e["seconds"] for e in history) * (self.recipe.epochs - epoch) / 60
        self.console.print(
            f"epoch {epoch:3d}/{self.recipe.epochs}  loss {last['loss']:.4f}  accuracy {last['accuracy']:.2f} %  "
            f"{last['seconds']:.1f} s, {rate:,.0f} images/s, {left:.1f} min left",
            soft_wrap=True,  # a line of a log stays one
        )
