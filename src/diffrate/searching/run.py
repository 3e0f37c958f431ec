"""`diffrate.search`: learn a schedule for each of several budgets on a few images."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import Dataset

import diffrate
from diffrate.compressed import CompressedModel, checked_operator
from diffrate.costs.base import CostModel, Costs
from diffrate.errors import DiffRateError
from diffrate.modes import frozen
from diffrate.operator import Operator
from diffrate.outputs import class_count
from diffrate.processes import together
from diffrate.results import origin as made_by
from diffrate.schedule import Schedule
from diffrate.searching import fast, paper
from diffrate.searching.best_of_many import BestOfMany
from diffrate.searching.budget import LAMBDAS, Budget, Space, check_budget, parse_budgets
from diffrate.searching.held_out import HeldOut
from diffrate.searching.images import SearchImages
from diffrate.searching.loop import Course, Loop, Settings, Snapshot
from diffrate.searching.places import best_places
from diffrate.searching.report import STATE, Progress, SearchFolder
from diffrate.searching.subject import FEW, SOFT, Subject

RECIPES = ("fast", "paper")
VIEWS = 4  # augmented views of an image that the fast recipe looks at: a dozen counts learn no image by heart
# (steps, images a step): what converges, and on a CPU what ends in minutes.
DEFAULTS = {
    ("fast", "cuda"): (80, 500),
    ("fast", "cpu"): (40, 40),
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
    model: nn.Module | Subject,
    data: Dataset[Any] | tuple[Dataset[Any], Dataset[Any]],
    budget: str | float | Budget,
    *,
    recipe: str = "fast",
    costs: Sequence[CostModel] = (),
    start: Schedule | None = None,
    operator: Operator | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    held_out: float = 0.2,
    checks: int = 10,
    patience: int = 3,
    mix: paper.Mix | None = None,
    lambdas: Mapping[str, float] | None = None,
    seed: int = 0,
    workers: int = 0,
    accelerator: Accelerator | None = None,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    name: str | None = None,
    origin: Mapping[str, Any] | None = None,
    progress: bool = True,
    command: str = "diffrate.search",
) -> SearchResult:
    """Learn how many tokens each block of `model` may keep within `budget`.

    data        a dataset of (image, label) or of images, or a pair of datasets of the same images, augmented and plain:
                the search learns on the first and checks on held-out images of the second.
    budget      GMACs as a number or "0.8G", a share as "60%", or what `costs` price: "2.1ms", "90mW", "5mJ". Different
                metrics are met together ("2.9G,37ms"); several values of one are one search each: "1.0G,0.9G,0.8G".
    costs       cost models beside MACs: a measured table (diffrate.costs.LatencyTable) or an accelerator (GemminiCost).
    start       a schedule to begin from; without, simple ones and the best of many random ones.
    operator    how tokens are removed; the recipe's own without it, where held-out images may add a floor. Where it
                prunes and merges, the fast recipe learns how much of each beside the counts.
    recipe      "fast": no labels, minutes, about 1,000 images; "paper": the published method.
    held_out    share of the images kept apart, at most 2,000; they decide, `checks` times a budget, whether an earlier
                schedule was clearly better and, after `patience` such checks in a row in the last part, when to stop.
    mix         for the paper's recipe: mixes a batch of images and labels (timm's Mixup).
    lambdas     for the paper's recipe: weight of each metric's loss.
    output      folder for schedule, history, configuration and plot; with `resume` an interrupted search there goes on,
                if `origin` (where weights and images come from) and everything else are the same.
    command     what the folder says the search was started by.
    """
    if recipe not in RECIPES:
        raise DiffRateError(f"recipe must be one of {', '.join(RECIPES)}, not {recipe!r}")
    started = time.monotonic()
    subject = model if isinstance(model, Subject) else _classifier(model)
    if recipe == "paper" and not subject.classifies:
        raise DiffRateError("the paper's recipe is for classifiers: use the fast one")
    model = subject.model
    accelerator = accelerator or Accelerator(mixed_precision="fp16" if torch.cuda.is_available() else "no")
    model.to(accelerator.device)
    backbone = subject.backbone
    space = Space.of(backbone, Costs([subject.cost(), *costs]))
    whole = space.cost.price_of(None)
    budgets = parse_budgets(budget, whole) if isinstance(budget, str) else [Budget.of(budget)]
    for target in budgets:
        check_budget(target, space)
    defaults = DEFAULTS[recipe, "cpu" if accelerator.device.type == "cpu" else "cuda"]
    base = operator or (fast.OPERATOR if recipe == "fast" else paper.OPERATOR)
    settings = Settings(
        recipe, budgets, checked_operator(base, backbone.layout), defaults[0] if steps is None else steps,
        defaults[1] if batch_size is None else batch_size, held_out, checks, patience, seed,
    )  # fmt: skip
    if recipe == "paper":
        paper.check(settings.operator, backbone.layout)
    augmented, plain = data if isinstance(data, tuple) else (data, data)
    views = VIEWS if recipe == "fast" else None
    images = SearchImages(augmented, plain, held_out, seed, views, accelerator.device)
    if settings.batch_size < accelerator.num_processes:
        raise DiffRateError(f"{accelerator.num_processes} processes need a batch of at least as many images")
    config = {
        **asdict(settings), "model": name, "images": images.count, "tokens": space.tokens, "whole": whole,
        "costs": [cost.describe() for cost in costs], "lambdas": dict(lambdas or {}),
        "precision": accelerator.mixed_precision, "origin": dict(origin or {}),
        "start": None if start is None else start.to_dict(), "chooses_operator": recipe == "fast" and operator is None,
        "softened": {"by": SOFT, "up to classes": FEW},
    }  # fmt: skip
    state = None if output is None else Path(output) / STATE
    with (
        together(accelerator.num_processes, "search", state),
        frozen(model),
        Progress(progress and accelerator.is_main_process) as bar,
    ):
        folder = SearchFolder(output, config, resume, accelerator)
        held = HeldOut(subject, images, accelerator, settings.batch_size, workers)

        def reduce(sums: Tensor) -> Tensor:
            total: Tensor = accelerator.reduce(sums, reduction="sum")
            return total

        many = BestOfMany(images, held, settings.batch_size, accelerator, workers, reduce, bar)

        def begin(budget: Budget, steps: int, last: Schedule | None, resumed: bool) -> Course:
            if recipe == "paper":
                common = (model, space, settings.operator, budget, steps)
                return paper.PaperRecipe(*common, reduce, mix, {**LAMBDAS, **(lambdas or {})})
            chosen = settings.operator if last is None else last.operator
            where = best_places(space, budget, chosen, held)
            first = fast.best_start(where, budget, chosen, held, start, last)
            if last is None and operator is None:
                chosen = fast.best_operator(where, budget, chosen, held, first.counts)
            if not resumed and (last is not None or start is None):
                first = many.begin(where, budget, chosen, first, steps, seed)
            return fast.FastRecipe(subject, where, chosen, budget, steps, first, seed, reduce)

        def check_labels(labels: Tensor) -> None:
            if recipe == "paper":
                paper.check_labels(labels, class_count(model))

        loop = Loop(
            settings, space, images, held, begin, check_labels, accelerator, folder, bar, workers, started
        )
        found = loop.run()
        result = SearchResult(
            _finished(found, settings, space, config, backbone.layout.img_size),
            found.history,
            found.seconds,
            sorted(set(gather_object(found.unreadable))),
        )
    folder.finish(result, made_by(command, accelerator.device))
    return result


def _classifier(model: nn.Module) -> Subject:
    model = model.original if isinstance(model, CompressedModel) else model
    if not getattr(model, "num_classes", 1) or getattr(model, "global_pool", None) == "":
        raise DiffRateError("the model has no classifier, whose answers a search could compare")
    return Subject(model)


def _finished(
    found: Snapshot, settings: Settings, space: Space, config: dict[str, Any], img_size: tuple[int, int]
) -> list[Schedule]:
    """The schedules, each with its cost and where it comes from."""
    schedules = []
    for i, (budget, best) in enumerate(zip(settings.budgets, found.found, strict=True)):
        schedule = Schedule.from_dict(best["schedule"])
        made = {
            "by": f"diffrate {diffrate.__version__} search",
            **{name: config[name] for name in ("recipe", "batch_size", "seed", "images")},
            "steps": settings.steps_for(i),
            "budget": str(budget),
            **{f"budget_{metric}": target for metric, target in budget.targets.items()},
            "held_out_divergence": best["divergence"],
            "best_step": best["step"],
        }
        cost = space.cost.price_of(schedule)
        schedules.append(replace(schedule, model=config["model"], img_size=img_size, cost=cost, made=made))
    return schedules
