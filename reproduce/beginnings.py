"""Beyond the paper: where a search begins, at simple shapes or between the best of many random ones.

A descent does not forget where it began, least of all where its images are few or the budget is tight: slopes compare
schedules that differ by a few tokens, and what an image makes of such a change is mostly chance. Shapes that differ
widely are told apart by few images. So a search first halves a crowd of random shapes on its images, and begins at the
mean of the last four. Here each search runs twice, from there and from the mean of the good ones of four simple shapes,
under one operator; by loss and divergence on validation images, which are not softened.

Cost: two searches for each seed and budget; with `--no-searches` the beginnings alone, before any step.

Measured here: results/reproduce_embedded_beginnings_h200.json, at 35 and 25 % of the MACs; and, by searches with one
count changed at a time, results/reproduce_embedded_beginnings_cpu.json.

    python reproduce/beginnings.py --budgets 35%,25% --json results/reproduce_embedded_beginnings_h200.json
    python reproduce/beginnings.py --model vit_tiny_patch16_224 --data-dir imagenet --crop-pct 1.0 \\
        --checkpoint vit_tiny_patch16_224.safetensors --budgets 0.81G,0.655G \\
        --json results/reproduce_vit_tiny_beginnings_h200.json
"""

from __future__ import annotations

import setting as shared
import torch
from many_schedules import MEASURES, ManySchedules
from setting import Setting, Table

import diffrate
from diffrate.costs.base import Costs
from diffrate.searching import fast
from diffrate.searching.best_of_many import BestOfMany
from diffrate.searching.budget import Budget, Space, rounded
from diffrate.searching.held_out import HeldOut
from diffrate.searching.images import SearchImages
from diffrate.searching.report import Progress
from diffrate.searching.run import DEFAULTS, VIEWS
from diffrate.searching.subject import Subject

PAPER = "nothing of the kind"
TITLE = "Searches by where they begin"
BEGINNINGS = ("simple shapes", "the best of many")
BEFORE = ", before the first step"
SEEDS = 3
HELD_OUT = 0.2  # of the images, as in a search


def run(setting: Setting, searches: bool = True) -> None:
    table = Table(setting, "beginnings", TITLE, PAPER)
    images, labels = (torch.cat(parts) for parts in zip(*setting.val, strict=True))
    with ManySchedules(setting.model, images, labels) as validation:

        def add(
            name: str, budget: float, seed: int, schedule: diffrate.Schedule, seconds: float | None = None
        ) -> None:
            own = validation.each([schedule], slice(0, len(labels))).mean(-1)[0].tolist()
            measured = dict(zip(MEASURES, own, strict=True))
            if seconds is not None:
                measured["seconds"] = seconds
            table.add(name, budget=budget, seed=seed, **measured, settings={"schedule": schedule.to_dict()})

        for seed in range(SEEDS):
            for budget in setting.budgets:
                setting.check_time()
                for name, begun in zip(BEGINNINGS, beginnings(setting, budget, seed), strict=True):
                    add(name + BEFORE, budget, seed, begun)
                    if searches:
                        add(name, budget, seed, *searched(setting, budget, seed, begun))


def beginnings(setting: Setting, budget: float, seed: int) -> tuple[diffrate.Schedule, diffrate.Schedule]:
    """Where a search would begin without random shapes, and where it does: under the operator that it would choose."""
    steps, batch_size = DEFAULTS["fast", "cpu" if setting.device.type == "cpu" else "cuda"]
    steps, batch_size = setting.steps or steps, setting.search_batch or batch_size
    subject = Subject(setting.model)
    space = Space.of(subject.backbone, Costs([subject.cost()]))
    images = SearchImages(*setting.search_data, HELD_OUT, seed, VIEWS, setting.device)
    held = HeldOut(subject, images, setting.accelerator, batch_size, setting.workers)
    simple = fast.best_start(space, Budget.of(budget), fast.OPERATOR, held, start=None, last=None)
    operator = fast.best_operator(space, budget, fast.OPERATOR, held, simple.counts)
    with Progress(shown=False) as bar:
        many = BestOfMany(
            images, held, batch_size, setting.accelerator, setting.workers, lambda sums: sums, bar
        )
        best = many.begin(space, budget, operator, simple, steps, seed)
    at_simple, at_best = (
        fast.schedule_of(rounded(each.counts, budget, space), space, operator) for each in (simple, best)
    )
    return at_simple, at_best


def searched(
    setting: Setting, budget: float, seed: int, start: diffrate.Schedule
) -> tuple[diffrate.Schedule, float]:
    """What the search finds from there, and its seconds, without those that finding the beginning took."""
    setting.check_time()
    found = diffrate.search(
        setting.model, setting.search_data, budget, seed=seed, operator=start.operator, steps=setting.steps,
        start=start, batch_size=setting.search_batch, accelerator=setting.accelerator, workers=setting.workers,
        progress=False,
    )  # fmt: skip
    return found.schedule, found.seconds


def main() -> None:
    flags = shared.parser(__doc__)
    flags.add_argument("--no-searches", action="store_true", help="the beginnings alone")
    arguments = flags.parse_args()
    with shared.ended_in_a_sentence():
        run(shared.setting(arguments), not arguments.no_searches)


if __name__ == "__main__":
    main()
