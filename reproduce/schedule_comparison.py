"""Schedule comparison (figure): the searched counts among 10,000 random schedules of the same MACs and operator.

The paper's figure has no numbers: its schedules were "close to optimal" among 10,000 random ones, evaluated whole. Here
two races on the validation images: by the mean negative log-likelihood, which is less noisy than accuracy, and by the
divergence from the uncompressed model, which is less noisy still, and is what the search makes small on its own images:

1. Images in a random order. All schedules see the first 64 (32 on a CPU); then the survivors as many again, and again,
   until the images end. On a GPU in half precision, from `--runners` processes (many_schedules.py).
2. After each part a schedule is out when it is worse than the searched one by more than 2.33 standard errors of the
   paired difference; out counts as worse. If differences were normal, a part would put out one in a hundred of those
   that are as good; they are not, and all schedules share the order of the images. So
3. 500 of those that are out, drawn at random, see all images after all: how many of them are better tells what the
   rule has missed.
4. The rank is the share of the 10,000 that ended with a lower mean than the searched schedule.

Random schedules: shares drawn evenly, sorted over the blocks, raised to the power that meets the MACs; the last block
of a class-token model gives up its tokens, as in the search. Beside them, the schedules of ToMe (constant number),
EViT (stepwise), constant rates and the paper, under the same operator.

Cost: a search, and races at the last of `--budgets`. How far a race goes depends on how many are hard to tell apart: of
ViT-Ti at 0.655 GMACs 1,226 images a schedule on average, which took 305 s on an H200 that six trainings shared. Hours
on a CPU: `--random 200`.

Measured here: results/reproduce_vit_tiny_race_h200.json, ViT-Ti at 0.655 GMACs: 85 of 10,000 ended with a lower loss,
0.85 %, and 4 with a lower divergence, under an earlier rule that let the better half go on. Other budgets and the
embedded model were not run.

    python reproduce/schedule_comparison.py --random 200 --json results/reproduce_embedded_schedule_comparison_cpu.json
    python reproduce/schedule_comparison.py --random 10000 --model vit_tiny_patch16_224 \\
        --checkpoint vit_tiny_patch16_224.safetensors --data-dir imagenet --crop-pct 1.0 --budgets 0.655G \\
        --json results/reproduce_vit_tiny_schedule_comparison_h200.json
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import setting as shared
import torch
from many_schedules import EACH, ManySchedules
from setting import OutOfTimeError, Setting, Table
from torch import Tensor

import diffrate
from diffrate.errors import DiffRateError
from diffrate.methods.schedules import (
    constant_number,
    constant_rate,
    published_schedule,
    random_schedules,
    stepwise,
)

FIRST = {"cpu": 32, "cuda": 64}  # images that every schedule sees
SURELY = 2.33  # standard errors
AUDITED = 500  # of those that are out
RANDOM = 10_000
RUNNERS = 12  # processes, on a GPU
PAPER = "a figure without numbers: close to optimal among 10,000 random schedules, for three operators and all FLOPs"


@dataclass
class Race:
    """How many of the schedules ended better than the reference, and how far each part went."""

    better: int
    total: int
    best: int  # index of the schedule with the lowest mean, the reference aside
    best_rise: float  # its mean minus the reference's, on the images that it saw
    entered: list[int]  # schedules that entered each part
    images: list[int]  # images seen by the end of each part
    out: list[int]  # indices of the schedules that did not see all images
    complete: bool  # whether time sufficed for all images


def race(
    many: ManySchedules,
    reference: diffrate.Schedule,
    schedules: Sequence[diffrate.Schedule],
    by: str = "loss",
    check_time: Callable[[], None] = lambda: None,
) -> Race:
    """Race schedules against a reference on images in their order, by "loss" or "divergence"."""
    sums = torch.zeros(len(schedules), 2, dtype=torch.float64)  # of the differences and their squares
    left, entered, seen = list(range(len(schedules))), [], []
    start, length, complete = 0, FIRST[many.device.type], True
    while start < many.images and left:
        part = slice(start, min(start + length, many.images))
        try:
            own = many.each([reference], part, by)
            added = torch.zeros_like(sums)
            at_once = EACH * max(many.workers, 1) * 2  # between two looks at the clock
            for some in (left[i : i + at_once] for i in range(0, len(left), at_once)):
                check_time()
                theirs = many.each([schedules[i] for i in some], part, by) - own
                if not theirs.isfinite().all():
                    raise FloatingPointError("a schedule has no loss: who is ahead cannot be said")
                added[some] = torch.stack([theirs.sum(dim=1), theirs.square().sum(dim=1)], dim=1)
        except OutOfTimeError:
            if not seen:
                raise
            complete = False
            break
        sums += added
        entered.append(len(left))
        start = length = part.stop
        seen.append(start)
        if start < many.images:
            left = survivors(left, sums, start)
    means = {i: float(sums[i, 0]) / start for i in left}
    best = min(means, key=lambda i: means[i]) if means else -1
    better = sum(mean < 0 for mean in means.values())
    rise = means.get(best, math.nan)
    out = sorted(set(range(len(schedules))) - set(left))
    return Race(better, len(schedules), best, rise, entered, seen, out, complete)


def audit(
    many: ManySchedules,
    reference: diffrate.Schedule,
    schedules: Sequence[diffrate.Schedule],
    by: str = "loss",
    check_time: Callable[[], None] = lambda: None,
) -> int:
    """How many schedules are better than the reference on all images."""
    check_time()
    every = slice(0, many.images)
    means = (many.each(schedules, every, by) - many.each([reference], every, by)).mean(dim=1)
    return int((means < 0).sum())


def survivors(left: Sequence[int], sums: Tensor, images: int) -> list[int]:
    """Who is not clearly worse than the reference."""
    mean = sums[left, 0] / images
    error = ((sums[left, 1] / images - mean.square()).clamp_min(0) / max(images - 1, 1)).sqrt()
    return [i for i, stays in zip(left, (mean <= SURELY * error).tolist(), strict=True) if stays]


def run(
    setting: Setting, count: int = RANDOM, given: diffrate.Schedule | None = None, runners: int | None = None
) -> None:
    """The races at the tightest budget; of a schedule that is `given`, or else searched for here."""
    if runners is None:
        runners = RUNNERS if setting.device.type == "cuda" else 0
    table = Table(setting, "schedule_comparison", f"Schedule comparison, {count:,} random ones", PAPER)
    images, labels = (torch.cat(parts) for parts in zip(*setting.val, strict=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(images.device)
    budget = setting.budgets[-1]
    found = setting.search(budget)[0] if given is None else given
    if abs(diffrate.gmacs(setting.model, found) / budget - 1) > 0.01:
        raise DiffRateError(
            f"the schedule costs {diffrate.gmacs(setting.model, found):.4f} GMACs, not {budget:g}"
        )
    table.measure("search", found, budget=budget)
    simple = {"ToMe's counts": constant_number, "EViT's counts": stepwise, "constant rate": constant_rate}
    for name, make in simple.items():
        table.measure(name, make(setting.model, budget, found.operator), budget=budget)
    paper = replace(published_schedule(setting.model, budget), operator=found.operator)
    table.measure("the paper's counts", paper, budget=budget)
    cost = diffrate.gmacs(setting.model, found)
    drawn = random_schedules(setting.model, cost, range(count), found.operator, last_is_free=True)
    with ManySchedules(setting.model, images[order], labels[order], runners) as many:
        for by in ("loss", "divergence"):
            began = time.monotonic()
            try:
                result = race(many, found, drawn, by, setting.check_time)
            except OutOfTimeError:
                table.add(f"the race by {by}", budget=budget, left_out="out of time")
                raise
            found_at = time.monotonic() - began
            some = torch.randperm(len(result.out), generator=torch.Generator().manual_seed(1))[:AUDITED]
            left_early = [drawn[result.out[i]] for i in some.tolist()]
            audited: dict[str, int] = {}
            if left_early and result.complete:
                after_all = audit(many, found, left_early, by, setting.check_time)
                audited = {"audited": len(left_early), "audited_better": after_all}
            table.add(
                f"the race by {by}",
                budget=budget,
                better=result.better,
                schedules=result.total,
                rank_percent=100 * result.better / result.total,
                **audited,
                complete=result.complete,
                seconds=found_at,
                runners=runners,
                entered=result.entered,
                images=result.images,
            )
            if result.best >= 0:
                table.measure(f"best random one by {by}", drawn[result.best], budget=budget, seed=result.best)


def main() -> None:
    flags = shared.parser(__doc__)
    flags.add_argument("--random", type=int, default=RANDOM, help="random schedules")
    flags.add_argument(
        "--schedule", type=Path, help="the file of a search that was run before, for its budget"
    )
    flags.add_argument("--runners", type=int, help=f"processes that evaluate; {RUNNERS} on a GPU without it")
    arguments = flags.parse_args()
    given = None if arguments.schedule is None else diffrate.Schedule.load(arguments.schedule)
    try:
        run(shared.setting(arguments), arguments.random, given, arguments.runners)
    except OutOfTimeError:
        print("out of time: the rows so far are saved")
    except DiffRateError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
