"""Schedule comparison (figure): the searched counts among 10,000 random schedules of the same MACs and operator.

The paper's figure has no numbers: its schedules were "close to optimal" among 10,000 random ones, evaluated whole. Here
a race on the validation images: by the mean negative log-likelihood, which is less noisy than accuracy, and by the
divergence from the uncompressed model, which is less noisy still, and is what the search makes small on its own images.
The searches of several seeds (`--seeds`, `--schedule`) are raced against at once, and with them the paper's counts for
a model of this shape, so that what counts are worth can be told from what the operator is worth:

1. Images in a random order. All schedules see the first 256 (32 on a CPU); then the survivors as many again, and again,
   until the images end. On a GPU in half precision, from `--runners` processes (many_schedules.py).
2. After each part a schedule is out when it is worse than all of these, by both measures, by more than 2.33
   standard errors of the paired difference; out counts as worse. If differences were normal, a part would put out at
   most one in a hundred of those that are as good; they are not, and all schedules share the order of the images. So
3. 500 of those that are out, drawn at random, see all images after all: how many of them are better bounds what the
   rule has missed (`most_missed`).
4. The rank is the share of the 10,000 that ended with a lower mean than a searched schedule. Beside it: how many have a
   lower one on the images at even places and on those at odd places as well, since what is better by chance seldom is
   twice; and its own mean: the race runs the whole model in half precision, where other tables have autocast, and
   rounding moves means by as much as lies between two good schedules.

Random schedules: shares drawn evenly, sorted over the blocks, raised to the power that meets the MACs; the last block
of a class-token model gives up its tokens, as in the search. Beside them, the schedules of ToMe (constant number),
EViT (stepwise), constant rates and the paper, under the same operator.

The paper has three panels: pruning, merging, and both. Searches here merge. With `--operation prune` they prune, and so
do the random ones; with `--operation prune-merge` all run under the paper's operator, where a search learns how much
each block prunes and merges, and random ones draw it.

Cost: at each of `--budgets` a search for each seed, and the race. How far a race goes depends on how many are hard to
tell apart: on an H200, ViT-Ti takes 143 s at 0.655 GMACs, 192 s at 0.81 and 333 s at 1.0, the latter two with other
work beside it; the embedded model on 10,000 images 433 s at 52 % of its MACs, 181 and 123 s at 35 and 25 %, side by
side. Without the paper's counts (`--no-control`), which many random ones are better than, fewer stay in the race. Start
CUDA's multi-process service before.

Measured here: results/reproduce_vit_tiny_schedule_comparison_h200.json, ViT-Ti, three searches each: of 10,000 random
ones 5, 2 and 5 have a lower loss at 0.655 GMACs, and none, none and 1 a lower divergence; at 0.81 it is 121, 89 and 42,
and 2, 3 and 4; at 1.0 66, 451 and 15, and 1, 10 and 2. The embedded model on 10,000 images:
results/reproduce_embedded_schedule_comparison_10000_h200.json, at 25 % 0, 9 and 3 have a lower loss, and 4, 20 and 11 a
lower divergence; at 35 % 2, 25 and 4, and 2, 13 and 1; at 52 % 1, 7 and 2, and 0, 3 and 6. None of 500 that had left a
race is better. The same on 2,000 images, with the paper's counts:
results/reproduce_embedded_schedule_comparison_h200.json. Pruning alone, on 10,000 images:
results/reproduce_embedded_schedule_comparison_prune_h200.json, at 52 % 87, 5 and 27 have a lower loss, and 171, 9 and
47 a lower divergence; at 35 % 13, 1 and 73, and 21, 1 and 74; at 25 % 0, 15 and 6, and 0, 9 and 4. The paper's
operator, on 10,000 images, which no random one sees to their end:
results/reproduce_embedded_schedule_comparison_prune_merge_h200.json. ViT-Ti by the mean of each image and its mirror
image (`--both-views`): results/reproduce_vit_tiny_schedule_comparison_both_views_h200.json, at 0.81 GMACs 14, 54 and 5
have a lower loss, and 1, 2 and 1 a lower divergence; at 1.0, of 2,000, it is 9, 2 and 0, and 0, 1 and 0.

    python reproduce/schedule_comparison.py --random 10000 --seeds 3 --budgets 52%,35%,25% \\
        --json results/reproduce_embedded_schedule_comparison_h200.json
    python reproduce/schedule_comparison.py --random 10000 --seeds 3 --budgets 52%,35%,25% --no-control \\
        --val-dir fashion-mnist --json results/reproduce_embedded_schedule_comparison_10000_h200.json
    python reproduce/schedule_comparison.py --random 10000 --seeds 3 --budgets 52%,35%,25% --no-control \\
        --val-dir fashion-mnist --operation prune \\
        --json results/reproduce_embedded_schedule_comparison_prune_h200.json
    python reproduce/schedule_comparison.py --random 10000 --seeds 3 --model vit_tiny_patch16_224 \\
        --checkpoint vit_tiny_patch16_224.safetensors --data-dir imagenet --crop-pct 1.0 --budgets 1.0G,0.81G,0.655G \\
        --json results/reproduce_vit_tiny_schedule_comparison_h200.json  # and with --both-views
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import setting as shared
import torch
from many_schedules import EACH, MEASURES, ManySchedules
from setting import OutOfTimeError, Setting, Table
from torch import Tensor, nn

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
from diffrate.operator import Operator
from diffrate.searching.many import in_order

FIRST = {"cpu": 32, "cuda": 256}  # images that every schedule sees
SURELY = 2.33  # standard errors
AUDITED = 500  # of those that are out
RANDOM = 10_000
RUNNERS = 12  # processes, on a GPU
CONTROL = "the paper's counts"
OPERATORS = {
    "merge": None,  # the operator that the search chooses
    "prune": Operator(operation="prune"),
    "prune-merge": Operator(),
}
PAPER = "a figure without numbers: close to optimal among 10,000 random schedules, for three operators and all FLOPs"


@dataclass
class Race:
    """How many of the schedules ended better than each reference, by each measure, and how far each part went."""

    better: list[list[int]]
    twice: list[list[int]]  # better on either half of the images
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
    even = torch.zeros_like(sums[0])  # of the differences on every other image
    own = torch.zeros(len(references), len(MEASURES), dtype=torch.float64)
    left, entered, seen = in_order(schedules), [], []  # side by side, those that share blocks
    start, length, complete = 0, FIRST[many.device.type], True
    while start < many.images and left:
        part = slice(start, min(start + length, many.images))
        try:
            theirs = many.each(references, part)
            added, added_even = torch.zeros_like(sums), torch.zeros_like(even)
            at_once = EACH * max(many.workers, 1) * 2  # between two looks at the clock
            for some in (left[i : i + at_once] for i in range(0, len(left), at_once)):
                check_time()
                differences = many.each([schedules[i] for i in some], part)[:, None] - theirs
                if not differences.isfinite().all():
                    raise FloatingPointError("a schedule has no loss: who is ahead cannot be said")
                added[:, some] = torch.stack([differences.sum(-1), differences.square().sum(-1)])
                added_even[some] = differences[..., ::2].sum(-1)
        except OutOfTimeError:
            if not seen:
                raise
            complete = False
            break
        sums += added
        even += added_even
        own += theirs.sum(-1)
        entered.append(len(left))
        start = length = part.stop
        seen.append(start)
        if start < many.images:
            left = survivors(left, sums, start)
    better = (sums[0, left] < 0).sum(0).tolist()
    twice = ((even[left] < 0) & (sums[0, left] - even[left] < 0)).sum(0).tolist()
    best = [left[i] for i in sums[0, left, 0].argmin(0).tolist()] if left else []
    out = sorted(set(range(len(schedules))) - set(left))
    return Race(better, twice, (own / max(start, 1)).tolist(), best, entered, seen, out, complete)


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
    control: bool = True,
    operation: str = "merge",
    both_views: bool = False,
) -> None:
    """A race at each budget, the tightest first: against schedules that are `given` for it, or searched for here.

    control     race the paper's counts too.
    operation   how searches and random ones remove tokens.
    both_views  an image counts by the mean of it and its mirror image: of one alone more is chance.
    """
    if runners is None:
        runners = RUNNERS if setting.device.type == "cuda" else 0
    for cost in (diffrate.gmacs(setting.model, each) for each in given):
        if all(off_budget(cost, budget) for budget in setting.budgets):
            asked = " or ".join(f"{budget:g}" for budget in setting.budgets)
            raise DiffRateError(f"a schedule costs {cost:.4f} GMACs, not {asked}")
    title = f"Schedule comparison, {count:,} random ones{', on images and mirror images' * both_views}"
    table = Table(setting, "schedule_comparison", title, PAPER)
    images, labels = (torch.cat(parts) for parts in zip(*setting.val, strict=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(images.device)
    with ManySchedules(setting.model, images[order], labels[order], runners, both_views) as many:
        for budget in sorted(setting.budgets):
            found = [each for each in given if not off_budget(diffrate.gmacs(setting.model, each), budget)]
            found = found or searched(setting, budget, seeds, OPERATORS[operation])
            at_budget(table, many, budget, found, count, control, both_views)


def searched(
    setting: Setting, budget: float, seeds: int, operator: Operator | None = None
) -> list[diffrate.Schedule]:
    """What the search finds with some seeds: under the first one's operator, since random ones run under one alone."""
    first = setting.search(budget, operator=operator)[0]
    others = (setting.search(budget, seed, operator=first.operator)[0] for seed in range(1, seeds))
    return [first, *others]


def at_budget(
    table: Table,
    many: ManySchedules,
    budget: float,
    found: Sequence[diffrate.Schedule],
    count: int,
    control: bool,
    both_views: bool = False,
) -> None:
    """The schedules found and simple ones, and then the race."""
    setting, operator = table.setting, found[0].operator
    if any(each.operator != operator for each in found):
        raise DiffRateError("the schedules have several operators; random ones can have only one")
    names = ["search", *(f"search {i}" for i in range(2, len(found) + 1))][: len(found)]
    references, words = dict(zip(names, found, strict=True)), operator.in_words()
    for name, each in references.items():
        table.measure(name, each, budget=budget, operator=words)
    others = simple_schedules(table, budget, operator)
    for name, each in others.items():
        table.measure(name, each, budget=budget, operator=words)
    if control and CONTROL in others:
        references[CONTROL] = others[CONTROL]
    cost = sum(diffrate.gmacs(setting.model, each) for each in references.values()) / len(references)
    drawn = random_schedules(setting.model, cost, range(count), operator, last_is_free=True)
    began = time.monotonic()
    try:
        result = race(many, list(references.values()), drawn, setting.check_time)
    except OutOfTimeError:
        for by in MEASURES:
            table.add(f"the race by {by}", budget=budget, left_out="out of time")
        raise
    seconds = time.monotonic() - began
    out = [drawn[i] for i in result.out] if result.complete else []
    audited, after_all = audit(many, list(references.values()), out)
    for i, name in enumerate(references):
        for j, by in enumerate(MEASURES):
            table.add(
                f"the race by {by}",
                budget=budget,
                search=name,
                better=result.better[i][j],
                better_in_both_halves=result.twice[i][j],
                schedules=count,
                rank_percent=100 * result.better[i][j] / count,
                own=result.own[i][j],
                audited=audited,
                audited_better=after_all[i][j],
                most_missed=most_missed(len(result.out), audited, after_all[i][j]),
                complete=result.complete,
                both_views=both_views,
                seconds=seconds,
                runners=many.workers,
                entered=result.entered,
                images=result.images,
            )
    for by, best in zip(MEASURES, result.best, strict=False):
        table.measure(f"best random one by {by}", drawn[best], budget=budget, operator=words, seed=best)
    if not result.complete:
        raise OutOfTimeError


def simple_schedules(table: Table, budget: float, operator: Operator) -> dict[str, diffrate.Schedule]:
    """Counts that nobody searched for here, under an operator; those that cannot meet the budget are left out."""

    def of_the_paper(model: nn.Module, budget: float, operator: Operator) -> diffrate.Schedule:
        return replace(published_schedule(model, budget), operator=operator)

    makers = {
        "ToMe's counts": constant_number,
        "EViT's counts": stepwise,
        "constant rate": constant_rate,
        CONTROL: of_the_paper,
    }
    made = {}
    for name, make in makers.items():
        try:
            made[name] = make(table.setting.model, budget, operator)
        except DiffRateError as error:
            table.add(name, budget=budget, left_out=str(error))
    return made


def main() -> None:
    flags = shared.parser(__doc__)
    flags.add_argument("--random", type=int, default=RANDOM, help="random schedules")
    flags.add_argument("--seeds", type=int, default=1, help="searches to race against")
    flags.add_argument(
        "--schedule",
        type=Path,
        nargs="+",
        default=[],
        help="files of searches that were run before; each is raced at its own budget",
    )
    flags.add_argument(
        "--control",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="race the paper's counts too; fewer leave early with them",
    )
    flags.add_argument(
        "--operation",
        choices=OPERATORS,
        default="merge",
        help="how searches here, and the random schedules, remove tokens",
    )
    flags.add_argument(
        "--both-views",
        action="store_true",
        help="an image counts by the mean of it and its mirror image: less of a rank is chance; twice the work",
    )
    flags.add_argument("--runners", type=int, help=f"processes that evaluate; {RUNNERS} on a GPU without it")
    arguments = flags.parse_args()
    if arguments.schedule and arguments.operation != "merge":
        flags.error("--operation says how to search: schedules that are given bring their operator")
    with shared.ended_in_a_sentence():
        given = [diffrate.Schedule.load(file) for file in arguments.schedule]
        run(
            shared.setting(arguments),
            arguments.random,
            given,
            arguments.runners,
            arguments.seeds,
            arguments.control,
            arguments.operation,
            arguments.both_views,
        )


if __name__ == "__main__":
    main()
