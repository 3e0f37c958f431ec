"""Schedule comparison (figure): the searched counts among 10,000 random schedules of the same MACs and operator.

The paper's figure has no numbers: its schedules were "close to optimal" among 10,000 random ones, evaluated whole. Here
a race on the validation images: by the mean negative log-likelihood, which is less noisy than accuracy, and by the
divergence from the uncompressed model, which is less noisy still, and is what the search makes small on its own images.
The searches of several seeds (`--seeds`, `--schedule`) are raced against at once, and with them the paper's counts for
a model of this shape, so that what counts are worth can be told from what the operator is worth:

1. Images in a random order. All schedules see the first 64 (32 on a CPU); then the survivors as many again, and again,
   until the images end. On a GPU in half precision, from `--runners` processes (many_schedules.py).
2. After each part a schedule is out when it is worse than all of these, by both measures, by more than 2.33
   standard errors of the paired difference; out counts as worse. If differences were normal, a part would put out at
   most one in a hundred of those that are as good; they are not, and all schedules share the order of the images. So
3. 500 of those that are out, drawn at random, see all images after all: how many of them are better bounds what the
   rule has missed (`most_missed`).
4. The rank is the share of the 10,000 that ended with a lower mean than a searched schedule. Its own mean stands beside
   it: the race runs the whole model in half precision, where other tables have autocast, and rounding moves means by as
   much as lies between two good schedules.

Random schedules: shares drawn evenly, sorted over the blocks, raised to the power that meets the MACs; the last block
of a class-token model gives up its tokens, as in the search. Beside them, the schedules of ToMe (constant number),
EViT (stepwise), constant rates and the paper, under the same operator.

Cost: a search for each seed, and the race at the last of `--budgets`. How far a race goes depends on how many are hard
to tell apart: of ViT-Ti at 0.655 GMACs 1,473 images a schedule on average, which took 363 s on an H200 that six
trainings shared. On two CPU cores the embedded model takes half an hour for 1,000 and 256 images.

Measured here: results/reproduce_vit_tiny_schedule_comparison_h200.json, ViT-Ti at 0.655 GMACs, three searches: of
10,000 random ones 86, 57 and 156 have a lower loss, and 3, none and none a lower divergence; none of 500 that had left
is better. Other budgets were not run. The embedded model, whose counts hardly matter, on a CPU:
results/reproduce_embedded_schedule_comparison_cpu.json, of 1,000 random ones 75 and 238 have a lower loss than two
searches, and 215 and 71 a lower divergence.

    python reproduce/schedule_comparison.py --random 1000 --images 256 --runners 2 --seeds 2 \\
        --json results/reproduce_embedded_schedule_comparison_cpu.json
    python reproduce/schedule_comparison.py --random 10000 --seeds 3 --model vit_tiny_patch16_224 \\
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
from many_schedules import EACH, MEASURES, ManySchedules
from setting import OutOfTimeError, Setting, Table
from torch import Tensor

import diffrate
from diffrate.errors import DiffRateError
from diffrate.methods.fit import off_budget
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
CONTROL = "the paper's counts"
PAPER = "a figure without numbers: close to optimal among 10,000 random schedules, for three operators and all FLOPs"


@dataclass
class Race:
    """How many of the schedules ended better than each reference, by each measure, and how far each part went."""

    better: list[list[int]]
    own: list[list[float]]  # the references' own means
    best: list[int]  # by each measure, the index of the schedule with the lowest mean
    entered: list[int]  # schedules that entered each part
    images: list[int]  # images seen by the end of each part
    out: list[int]  # indices of the schedules that did not see all images
    complete: bool  # whether time sufficed for all images


def race(
    many: ManySchedules,
    references: Sequence[diffrate.Schedule],
    schedules: Sequence[diffrate.Schedule],
    check_time: Callable[[], None] = lambda: None,
) -> Race:
    """Race schedules against references on images in their order."""
    # Of the differences and their squares, (2, S, R, 2): to each reference, by each measure.
    sums = torch.zeros(2, len(schedules), len(references), len(MEASURES), dtype=torch.float64)
    own = torch.zeros(len(references), len(MEASURES), dtype=torch.float64)
    left, entered, seen = list(range(len(schedules))), [], []
    start, length, complete = 0, FIRST[many.device.type], True
    while start < many.images and left:
        part = slice(start, min(start + length, many.images))
        try:
            theirs = many.each(references, part)
            added = torch.zeros_like(sums)
            at_once = EACH * max(many.workers, 1) * 2  # between two looks at the clock
            for some in (left[i : i + at_once] for i in range(0, len(left), at_once)):
                check_time()
                differences = many.each([schedules[i] for i in some], part)[:, None] - theirs
                if not differences.isfinite().all():
                    raise FloatingPointError("a schedule has no loss: who is ahead cannot be said")
                added[:, some] = torch.stack([differences.sum(-1), differences.square().sum(-1)])
        except OutOfTimeError:
            if not seen:
                raise
            complete = False
            break
        sums += added
        own += theirs.sum(-1)
        entered.append(len(left))
        start = length = part.stop
        seen.append(start)
        if start < many.images:
            left = survivors(left, sums, start)
    better = (sums[0, left] < 0).sum(0).tolist()
    best = [left[i] for i in sums[0, left, 0].argmin(0).tolist()] if left else []
    out = sorted(set(range(len(schedules))) - set(left))
    return Race(better, (own / max(start, 1)).tolist(), best, entered, seen, out, complete)


def survivors(left: Sequence[int], sums: Tensor, images: int) -> list[int]:
    """Who is not clearly worse than all references by all measures."""
    mean, square = sums[:, left] / images
    error = ((square - mean.square()).clamp_min(0) / max(images - 1, 1)).sqrt()
    stays = (mean <= SURELY * error).flatten(1).any(1)
    return [i for i, one in zip(left, stays.tolist(), strict=True) if one]


def audit(
    many: ManySchedules, references: Sequence[diffrate.Schedule], out: Sequence[diffrate.Schedule]
) -> tuple[int, list[list[int]]]:
    """Some of the schedules that left a race, on all images: how many, and how many of them are better after all."""
    some = torch.randperm(len(out), generator=torch.Generator().manual_seed(1))[:AUDITED].tolist()
    every = slice(0, many.images)
    theirs = many.each(references, every).mean(-1)
    audited = torch.zeros(0, *theirs.shape)
    if some:
        audited = many.each([out[i] for i in some], every).mean(-1)[:, None] - theirs
    return len(some), (audited < 0).sum(0).tolist()


def most_missed(out: int, audited: int, better: int) -> int:
    """So many of those that are out are better, at most: with more, so few among the audited had a chance below 5 %."""
    missed = better
    while missed < out - audited + better:
        ways = sum(
            math.comb(missed + 1, k) * math.comb(out - missed - 1, audited - k) for k in range(better + 1)
        )
        if 20 * ways < math.comb(out, audited):
            break
        missed += 1
    return missed


def run(
    setting: Setting,
    count: int = RANDOM,
    given: Sequence[diffrate.Schedule] = (),
    runners: int | None = None,
    seeds: int = 1,
) -> None:
    """The race at the tightest budget: against schedules that are `given`, or searched for here by their seeds."""
    if runners is None:
        runners = RUNNERS if setting.device.type == "cuda" else 0
    table = Table(setting, "schedule_comparison", f"Schedule comparison, {count:,} random ones", PAPER)
    images, labels = (torch.cat(parts) for parts in zip(*setting.val, strict=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(images.device)
    budget = setting.budgets[-1]
    found = list(given) or [setting.search(budget)[0]]
    if not given:  # random schedules run under one operator, so that later searches take the first one's
        found += [setting.search(budget, seed, operator=found[0].operator)[0] for seed in range(1, seeds)]
    costs = [diffrate.gmacs(setting.model, each) for each in found]
    for cost in costs:
        if off_budget(cost, budget):
            raise DiffRateError(f"the schedule costs {cost:.4f} GMACs, not {budget:g}")
    operator = found[0].operator
    if any(each.operator != operator for each in found):
        raise DiffRateError("the schedules have several operators; random ones can have only one")
    names = ["search", *(f"search {i}" for i in range(2, len(found) + 1))]
    for name, each in zip(names, found, strict=True):
        table.measure(name, each, budget=budget)
    simple = {"ToMe's counts": constant_number, "EViT's counts": stepwise, "constant rate": constant_rate}
    for name, make in simple.items():
        table.measure(name, make(setting.model, budget, operator), budget=budget)
    paper = replace(published_schedule(setting.model, budget), operator=operator)
    table.measure(CONTROL, paper, budget=budget)
    drawn = random_schedules(
        setting.model, sum(costs) / len(costs), range(count), operator, last_is_free=True
    )
    began = time.monotonic()
    with ManySchedules(setting.model, images[order], labels[order], runners) as many:
        try:
            result = race(many, [*found, paper], drawn, setting.check_time)
        except OutOfTimeError:
            for by in MEASURES:
                table.add(f"the race by {by}", budget=budget, left_out="out of time")
            raise
        seconds = time.monotonic() - began
        audited, after_all = audit(
            many, [*found, paper], [drawn[i] for i in result.out] if result.complete else []
        )
    for i, name in enumerate([*names, CONTROL]):
        for j, by in enumerate(MEASURES):
            table.add(
                f"the race by {by}",
                budget=budget,
                search=name,
                better=result.better[i][j],
                schedules=count,
                rank_percent=100 * result.better[i][j] / count,
                own=result.own[i][j],
                audited=audited,
                audited_better=after_all[i][j],
                most_missed=most_missed(len(result.out), audited, after_all[i][j]),
                complete=result.complete,
                seconds=seconds,
                runners=runners,
                entered=result.entered,
                images=result.images,
            )
    for by, best in zip(MEASURES, result.best, strict=False):
        table.measure(f"best random one by {by}", drawn[best], budget=budget, seed=best)


def main() -> None:
    flags = shared.parser(__doc__)
    flags.add_argument("--random", type=int, default=RANDOM, help="random schedules")
    flags.add_argument("--seeds", type=int, default=1, help="searches to race against")
    flags.add_argument(
        "--schedule", type=Path, nargs="+", default=[], help="files of searches that were run before, instead"
    )
    flags.add_argument("--runners", type=int, help=f"processes that evaluate; {RUNNERS} on a GPU without it")
    arguments = flags.parse_args()
    try:
        given = [diffrate.Schedule.load(file) for file in arguments.schedule]
        run(shared.setting(arguments), arguments.random, given, arguments.runners, arguments.seeds)
    except OutOfTimeError:
        print("out of time: the rows so far are saved")
    except DiffRateError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
