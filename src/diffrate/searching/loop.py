"""The loop that both recipes share: draw a batch, take a step, check on held-out images now and then, save.

Each next, tighter budget starts from the last answer. All that changes is in one Snapshot, which is also the file that
a resumed run reads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol

from accelerate import Accelerator
from torch import Tensor

from diffrate.errors import DiffRateError, shown
from diffrate.operator import Operator
from diffrate.schedule import Schedule
from diffrate.searching.budget import Budget, Space
from diffrate.searching.held_out import HeldOut
from diffrate.searching.images import SearchImages
from diffrate.searching.report import Progress, SearchFolder
from diffrate.seeding import seeded

ARRIVES = 0.6  # share of the steps from which on clearly worse answers may end a search


class Course(Protocol):
    """One budget's search by some recipe."""

    returns_last: ClassVar[bool]

    def step(self, images: Tensor, labels: Tensor) -> float | Tensor: ...
    def present(self) -> Schedule: ...
    def answer(self) -> Schedule: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Settings:
    """What a search was asked to do: two runs with equal settings and images end in the same schedules."""

    recipe: str
    budgets: list[Budget]
    operator: Operator
    steps: int
    batch_size: int
    held_out: float
    checks: int
    patience: int
    seed: int

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size, self.checks, self.patience) < 1 or not 0 < self.held_out < 1:
            raise DiffRateError(
                "steps, batch size, checks and patience must be at least 1, and held_out between 0 and 1"
            )
        if not 0 <= self.seed < 2**31:
            raise DiffRateError(f"seed must be from 0 to {2**31 - 1}, not {shown(self.seed)}")

    def steps_for(self, budget: int) -> int:
        """A front costs little more than one search: the first budget gets all steps, the others half."""
        return self.steps if budget == 0 else max(1, self.steps // 2)


@dataclass
class Snapshot:
    """Where a search stands: budgets and steps done, the course of the present one, and what was found and seen."""

    budget: int = 0
    step: int = 0
    course: dict[str, Any] | None = None
    best: dict[str, Any] = field(default_factory=dict)
    found: list[dict[str, Any]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Loop:
    """Runs a search to its end.

    `begin` makes the course of a budget from its steps and the last schedule found; one that is resumed, and restored
    then, need not look for where to begin.
    """

    def __init__(
        self,
        settings: Settings,
        space: Space,
        images: SearchImages,
        held_out: HeldOut,
        begin: Callable[[Budget, int, Schedule | None, bool], Course],
        check_labels: Callable[[Tensor], None],
        accelerator: Accelerator,
        folder: SearchFolder,
        bar: Progress,
        workers: int,
        started: float,
    ) -> None:
        self.settings, self.space, self.images, self.held_out = settings, space, images, held_out
        self.begin, self.check_labels, self.accelerator = begin, check_labels, accelerator
        self.folder, self.bar, self.workers = folder, bar, workers
        self.started = started
        self.lowest: Tensor | None = None
        self.now = folder.load_state(Snapshot)
        self.started -= self.now.seconds
        self._remember(held_out.unreadable)

    def run(self) -> Snapshot:
        while self.now.budget < len(self.settings.budgets):
            self._one_budget()
            self.now.found.append(self.now.best)
            self.now.budget += 1
            self.now.step, self.now.course, self.now.best, self.lowest = 0, None, {}, None
            self._save()
        return self.now

    def _one_budget(self) -> None:
        now, settings = self.now, self.settings
        budget, steps = settings.budgets[now.budget], settings.steps_for(now.budget)
        last = Schedule.from_dict(now.found[-1]["schedule"]) if now.found else None
        course = self.begin(budget, steps, last, now.course is not None)
        if now.course is not None:
            course.restore(now.course)
        every = math.ceil(steps / settings.checks)
        self.bar.start(budget, steps, now.step)
        offset = now.budget * 100_003  # other images for every budget
        if now.step == 0 and not course.returns_last:
            self._check(course, steps)  # what the search started from is a candidate too
        if self._stops(course):
            return
        for batch in self.images.batches(
            offset + now.step, offset + steps, settings.batch_size, self.workers,
            self.accelerator.process_index, self.accelerator.num_processes,
        ):  # fmt: skip
            self._remember(batch.unreadable)
            if not len(batch.images):
                raise DiffRateError(f"no image of a batch could be read; the first: {batch.unreadable[0]}")
            self.check_labels(batch.labels)
            before = None if course.returns_last else course.present()
            loss = self._step(course, batch.images, batch.labels)
            now.step += 1
            checking = now.step % every == 0 or now.step == steps
            saving = checking or self.folder.due()
            if before or saving:  # a loss still on the device is waited for only when it must be known
                loss = self._finite(loss)
            entry = self._record(before or course.present(), loss, budget) if before or checking else None
            self.bar.update(entry)
            if entry is not None and checking:
                entry["held_out"] = self._check(course, steps)
            if saving:
                now.course = course.state()
                self._save()
            if self._stops(course):
                break

    def _step(self, course: Course, images: Tensor, labels: Tensor) -> float | Tensor:
        device = self.accelerator.device
        # What is random in a step is random by its number, so that a resumed run repeats it.
        number = (self.settings.seed * 1_000_003 + self.now.budget * 100_003 + self.now.step) % 2**31
        with seeded(number, device), self.accelerator.autocast():
            return course.step(images.to(device, non_blocking=True), labels.to(device, non_blocking=True))

    def _stops(self, course: Course) -> bool:
        """Whether the last checks were all clearly worse, for a recipe that does not simply return its last answer."""
        return not course.returns_last and self.now.best.get("without", 0) >= self.settings.patience

    def _finite(self, loss: float | Tensor) -> float:
        loss = float(loss)
        if not math.isfinite(loss):
            raise DiffRateError(
                f"the loss is {loss} at step {self.now.step - 1}: the search stopped, and its last good state is kept; "
                "the model or its images may overflow in this precision"
            )
        return loss

    def _record(self, schedule: Schedule, loss: float | Tensor, budget: Budget) -> dict[str, Any]:
        loss, step, runs = float(loss), self.now.step - 1, schedule.effective
        prices = self.space.price(self.space.searched(schedule))
        costs = {metric: float(price) for metric, price in prices.items()}
        entry = {"budget": str(budget), "step": step, "loss": loss, **costs, "kept": list(runs.merge)}
        if schedule.operator.splits:
            entry["left_by_pruning"] = list(runs.prune)
        self.now.history.append(entry)
        self.accelerator.log({"loss": loss, **costs}, step=len(self.now.history))
        return entry

    def _check(self, course: Course, steps: int) -> float:
        """Take the present answer, unless an earlier one is clearly better on held-out images.

        They are few: between answers that differ by less than their noise, the later one has learned from more images.
        """
        now, schedule = self.now, course.answer()
        each = self.held_out.each(schedule)
        divergence = self.held_out.mean(each)
        taken = {"schedule": schedule.to_dict(), "divergence": divergence, "step": now.step, "without": 0}
        if not now.best or divergence < now.best["lowest"]["divergence"]:
            now.best = {**taken, "lowest": {"schedule": schedule.to_dict(), "divergence": divergence}}
            self.lowest = each
        elif course.returns_last or not self.held_out.clearly_above(each, self._lowest()):
            now.best = {**taken, "lowest": now.best["lowest"]}
        elif now.step > ARRIVES * steps:  # before, the counts are still on their way
            now.best["without"] += 1
        return divergence

    def _lowest(self) -> Tensor:
        """What the answer of lowest divergence had on each held-out image; after a resumption it is measured again."""
        if self.lowest is None:
            self.lowest = self.held_out.each(Schedule.from_dict(self.now.best["lowest"]["schedule"]))
        return self.lowest

    def _remember(self, unreadable: list[str]) -> None:
        self.now.unreadable += [reason for reason in unreadable if reason not in self.now.unreadable]

    def _save(self) -> None:
        self.now.seconds = time.monotonic() - self.started
        self.folder.save_state(asdict(self.now))
