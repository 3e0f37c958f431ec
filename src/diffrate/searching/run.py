"""`diffrate.search`: learn a schedule for each of several budgets on a few images.

One loop serves both recipes: draw a batch, ask the uncompressed model, take a step, now and then check the schedule so
far on held-out images, save. Each next, tighter budget starts from the last answer.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset

import diffrate
from diffrate.backbones import backbone_of
from diffrate.compressed import CompressedModel, checked_operator, compress
from diffrate.costs.macs import MacCost
from diffrate.errors import DiffRateError
from diffrate.operator import Operator
from diffrate.schedule import Schedule
from diffrate.searching import fast, paper
from diffrate.searching.budget import Space, check_budget, parse_budgets, project
from diffrate.searching.descent import AVERAGED
from diffrate.searching.images import SearchImages
from diffrate.searching.report import Progress, RunFolder

RECIPES = ("fast", "paper")
# (steps, images a step): what converges, and on a CPU what ends in minutes.
DEFAULTS = {
    ("fast", "cuda"): (120, 125),
    ("fast", "cpu"): (60, 40),
    ("paper", "cuda"): (400, 250),
    ("paper", "cpu"): (60, 32),
}


@dataclass
class SearchResult:
    """What a search found: a schedule for each budget, largest budget first, and its course."""

    schedules: list[Schedule]
    history: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    unreadable: list[str] = field(default_factory=list)

    @property
    def schedule(self) -> Schedule:
        """The schedule of the tightest budget: the only one, where one was asked for."""
        return self.schedules[-1]


def search(
    model: nn.Module,
    data: Dataset[Any] | tuple[Dataset[Any], Dataset[Any]],
    budget: str | float,
    *,
    recipe: str = "fast",
    operator: Operator | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    held_out: float = 0.2,
    checks: int = 10,
    patience: int = 3,
    mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    seed: int = 0,
    workers: int = 0,
    accelerator: Accelerator | None = None,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    name: str | None = None,
    progress: bool = True,
) -> SearchResult:
    """Learn how many tokens each block of `model` may keep within `budget`.

    data        a dataset of (image, label) or of images, or a pair of datasets of the same images, augmented and plain:
                the search learns on the first and checks on held-out images of the second.
    budget      GMACs as a number or "0.8G", a share as "60%", or several: "1.0G,0.9G,0.8G".
    recipe      "fast": no labels, minutes, about 1,000 images; "paper": the published method.
    held_out    share of the images kept apart; they decide, `checks` times a budget, which schedule is returned and,
                after `patience` checks without a better one in the last part, when to stop.
    mix         for the paper's recipe: mixes a batch of images and labels (timm's Mixup).
    output      folder for schedule, history, configuration and plot; with `resume` an interrupted search there goes on.
    """
    started = time.monotonic()
    if recipe not in RECIPES:
        raise DiffRateError(f"recipe must be one of {', '.join(RECIPES)}, not {recipe!r}")
    model = model.original if isinstance(model, CompressedModel) else model
    accelerator = accelerator or Accelerator(mixed_precision="fp16" if torch.cuda.is_available() else "no")
    device = accelerator.device
    model.to(device)
    backbone = backbone_of(model)
    cost = MacCost.of_backbone(backbone)
    space = Space.of(backbone, cost)
    whole = cost.of_schedule(None)
    budgets = parse_budgets(budget, whole) if isinstance(budget, str) else [float(budget)]
    for target in budgets:
        check_budget(target, space)
    defaults = DEFAULTS[recipe, "cpu" if device.type == "cpu" else "cuda"]
    steps, batch_size = steps or defaults[0], batch_size or defaults[1]
    if steps < 1 or batch_size < 1 or not 0 < held_out < 1 or checks < 1:
        raise DiffRateError("steps, batch size and checks must be at least 1, and held_out between 0 and 1")
    operator = checked_operator(
        operator or (fast.OPERATOR if recipe == "fast" else paper.OPERATOR), backbone.layout
    )
    augmented, plain = data if isinstance(data, tuple) else (data, data)
    images = SearchImages(augmented, plain, held_out, seed)
    config = {
        "model": name, "recipe": recipe, "budgets": budgets, "operator": vars(operator), "steps": steps,
        "batch_size": batch_size, "held_out": held_out, "checks": checks, "patience": patience, "seed": seed,
        "images": len(images.training) + len(images.held_out), "tokens": space.tokens, "gmacs": whole,
    }  # fmt: skip
    folder = RunFolder(output, config, resume, accelerator.is_main_process)
    run = _Search(
        model, space, operator, images, accelerator, batch_size, checks, patience, seed, workers, mix, folder
    )
    training = model.training
    frozen = [p for p in model.parameters() if p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        with Progress(progress and accelerator.is_main_process, len(budgets)) as bar:
            run.all_budgets(budgets, recipe, steps, bar)
    finally:
        model.train(training)
        for parameter in frozen:
            parameter.requires_grad_(True)
    schedules = [
        _finished(found, target, cost, backbone.layout.img_size, config)
        for target, found in zip(budgets, run.found, strict=True)
    ]
    result = SearchResult(schedules, run.history, run.seconds + time.monotonic() - started, run.unreadable)
    folder.finish(result)
    return result


def _finished(
    found: dict[str, Any], budget: float, cost: MacCost, img_size: tuple[int, int], config: dict[str, Any]
) -> Schedule:
    """The schedule with where it comes from."""
    schedule = Schedule.from_dict(found["schedule"])
    made = {
        "by": f"diffrate {diffrate.__version__} search",
        **{name: config[name] for name in ("recipe", "steps", "batch_size", "seed", "images")},
        "budget_gmacs": budget,
        "held_out_divergence": found["divergence"],
        "stopped_at": found["step"],
    }
    gmacs = cost.of_schedule(schedule)
    return replace(schedule, model=config["model"], img_size=img_size, cost={"gmacs": gmacs}, made=made)


class _Search:
    """The state of a search over all budgets; `snapshot` is all of it that a resumed run needs."""

    def __init__(
        self, model: nn.Module, space: Space, operator: Operator, images: SearchImages, accelerator: Accelerator,
        batch_size: int, checks: int, patience: int, seed: int, workers: int,
        mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None, folder: RunFolder,
    ) -> None:  # fmt: skip
        self.model, self.backbone, self.space, self.operator = model, backbone_of(model), space, operator
        self.images, self.accelerator, self.folder = images, accelerator, folder
        self.batch_size, self.checks, self.patience, self.seed = batch_size, checks, patience, seed
        self.workers, self.mix = workers, mix
        self.found: list[dict[str, Any]] = []
        self.history: list[dict[str, Any]] = []
        self.unreadable: list[str] = []
        self.seconds = 0.0  # of earlier runs that this one resumes
        self.held: list[tuple[Tensor, Tensor]] = []

    def reduce(self, sums: Tensor) -> Tensor:
        total: Tensor = self.accelerator.reduce(sums, reduction="sum")
        return total

    def all_budgets(self, budgets: list[float], recipe: str, steps: int, bar: Progress) -> None:
        saved = self.folder.load_state()
        if saved:
            self.found, self.history, self.unreadable = saved["found"], saved["history"], saved["unreadable"]
            self.seconds = saved["seconds"]
        started = time.monotonic() - self.seconds
        self._load_held_out()
        for index in range(len(self.found), len(budgets)):
            # A front costs little more than one search: the first budget gets all steps, the others half.
            count = steps if index == 0 else max(1, steps // 2)
            course = self._recipe(recipe, budgets[index], count)
            best: dict[str, Any] = {}
            if saved and saved["budget"] == index and saved["course"] is not None:
                course.restore(saved["course"])
                best = saved["best"]
            first = saved["step"] if saved and saved["budget"] == index else 0
            best = self._one_budget(course, index, first, count, budgets[index], best, bar, started)
            self.found.append(best)
            self._save(index + 1, 0, None, {}, started)

    def _recipe(self, recipe: str, budget: float, steps: int) -> fast.FastRecipe | paper.PaperRecipe:
        device = self.accelerator.device
        if recipe == "paper":
            return paper.PaperRecipe(
                self.backbone, self.space, self.operator, budget, steps, self.reduce, device
            )
        candidates = fast.starts(self.space, budget)
        step = torch.where(self.space.free, 1.0, 1e-3).double()
        blocks = len(self.space.least)
        if self.found:
            last = torch.tensor(self.found[-1]["schedule"]["merge"][:blocks], dtype=torch.float64)
            candidates = [project(last, budget, self.space, step)]
        if not candidates:
            candidates = [project(self.space.most, budget, self.space, step)]
        courses = [
            fast.FastRecipe(
                self.backbone, self.space, self.operator, budget, start, steps, self.seed, self.reduce
            )
            for start in candidates
        ]
        if len(courses) == 1:
            return courses[0]
        return min(courses, key=lambda course: self._divergence(course.schedule(course.counts()), batches=1))

    def _one_budget(
        self, course: fast.FastRecipe | paper.PaperRecipe, index: int, first: int, steps: int, budget: float,
        best: dict[str, Any], bar: Progress, started: float,
    ) -> dict[str, Any]:  # fmt: skip
        every = max(1, math.ceil(steps / self.checks))
        offset = len(self.found) * 100_003  # other images for every budget
        process, processes = self.accelerator.process_index, self.accelerator.num_processes
        batches = self.images.batches(
            offset + first, offset + steps, self.batch_size, self.workers, process, processes
        )
        bar.start(budget, steps, first)
        for step in range(first, steps):
            batch = next(batches)
            self.unreadable += [reason for reason in batch.unreadable if reason not in self.unreadable]
            counts = course.counts() if isinstance(course, fast.FastRecipe) else None
            loss = self._step(course, batch.images, batch.labels, step)
            checking = (step + 1) % every == 0 or step + 1 == steps
            if counts is not None or checking:
                entry = self._record(course, counts, loss, step, budget)
                bar.update(entry)
            else:
                bar.update(None)
            if checking:
                schedule = course.answer()
                divergence = self._divergence(schedule)
                self.history[-1]["held_out"] = divergence
                if not best or divergence < best["divergence"]:
                    best = {
                        "schedule": schedule.to_dict(),
                        "divergence": divergence,
                        "step": step + 1,
                        "without": 0,
                    }
                elif step + 1 > (1 - AVERAGED) * steps:  # before, the counts are still on their way
                    best["without"] += 1
            if checking or self.folder.due():
                self._save(index, step + 1, course.state(), best, started)
            # The paper's recipe runs its course; its last answer is what the paper would return.
            if best and best["without"] >= self.patience and isinstance(course, fast.FastRecipe):
                break
        if isinstance(course, paper.PaperRecipe):
            schedule = course.answer()
            raw = course.raw()
            best = {
                "schedule": schedule.to_dict(), "divergence": self._divergence(schedule), "step": steps, "without": 0,
                "raw": {"prune": list(raw.prune), "merge": list(raw.merge), "gmacs": self.space.cost.of_schedule(raw)},
            }  # fmt: skip
        return best

    def _step(
        self, course: fast.FastRecipe | paper.PaperRecipe, images: Tensor, labels: Tensor, step: int
    ) -> Any:
        device = self.accelerator.device
        if isinstance(course, paper.PaperRecipe):
            self._check_labels(labels)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        torch.manual_seed(self.seed * 1_000_003 + step)  # what is random in a step is random by its number
        if isinstance(course, fast.FastRecipe):
            self.model.eval()
            with torch.no_grad(), self.accelerator.autocast():
                return course.step(images, labels, _logits(self.model, images))
        self.model.train()  # drop path on, weights frozen
        if self.mix is not None:
            images, labels = self.mix(images, labels)
        with self.accelerator.autocast():
            return course.step(images, labels, labels)

    def _check_labels(self, labels: Tensor) -> None:
        """On the host, before the batch leaves it: a wait for the device at every step would cost more."""
        classes = int(getattr(self.model, "num_classes", 0))
        lowest, highest = int(labels.min()), int(labels.max())
        if lowest < 0 or highest >= classes:
            found = "none" if lowest < 0 else f"a label {highest}"
            raise DiffRateError(
                f"the paper's recipe learns from labels from 0 to {classes - 1}, and these images have {found}"
            )

    def _record(
        self,
        course: fast.FastRecipe | paper.PaperRecipe,
        counts: list[int] | None,
        loss: Any,
        step: int,
        budget: float,
    ) -> dict[str, Any]:
        loss = float(loss)
        if not math.isfinite(loss):
            raise DiffRateError(
                f"the loss is {loss} at step {step}: the search stopped, and its last good state is kept; "
                "the model or its images may overflow in this precision"
            )
        kept = counts if counts is not None else course.counts()
        gmacs = float(self.space.gmacs(torch.tensor(kept, dtype=torch.float64)))
        entry = {"budget": budget, "step": step, "loss": loss, "gmacs": gmacs, "kept": list(kept)}
        self.history.append(entry)
        self.accelerator.log({"loss": loss, "gmacs": gmacs}, step=len(self.history))
        return entry

    def _load_held_out(self) -> None:
        process, processes = self.accelerator.process_index, self.accelerator.num_processes
        self.model.eval()
        for batch in self.images.held_out_batches(self.batch_size, self.workers, process, processes):
            self.unreadable += batch.unreadable
            with torch.no_grad(), self.accelerator.autocast():
                images = batch.images.to(self.accelerator.device)
                self.held.append((images, _logits(self.model, images)))

    @torch.no_grad()
    def _divergence(self, schedule: Schedule, batches: int | None = None) -> float:
        """Mean divergence from the uncompressed model on the held-out images."""
        self.model.eval()
        fast_model = compress(self.model, schedule)
        sums = torch.zeros(2, dtype=torch.float64, device=self.accelerator.device)
        for images, teacher in self.held[:batches]:
            with self.accelerator.autocast():
                each = fast.divergence(teacher, _logits(fast_model, images))
            sums += torch.stack([each.sum(dtype=torch.float64), sums.new_tensor(float(len(each)))])
        total = self.reduce(sums)
        return float(total[0] / total[1])

    def _save(
        self, index: int, step: int, course: dict[str, Any] | None, best: dict[str, Any], started: float
    ) -> None:
        self.folder.save_state(
            {
                "budget": index, "step": step, "course": course, "best": best, "found": self.found,
                "history": self.history, "unreadable": self.unreadable, "seconds": time.monotonic() - started,
            }
        )  # fmt: skip


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    """Logits, of the first head where there are two."""
    out: Any = model(images)
    logits: Tensor = out[0] if isinstance(out, tuple) else out
    return logits
