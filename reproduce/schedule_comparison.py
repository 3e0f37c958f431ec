"""Schedule comparison (figure): the searched counts among 10,000 random schedules of the same MACs and operator.

The paper's figure has no numbers: its schedules were "close to optimal" among 10,000 random ones, evaluated whole. Here
a race on the validation images, by the mean negative log-likelihood, which is less noisy than accuracy:

1. Images in a random order. All schedules see the first 32 (128 on a GPU, where that takes no longer); then the
   survivors as many again, and again, until the images end.
2. After each part a schedule is out when it is worse than the searched one by more than 3 standard errors of the paired
   difference: it would have to be a very unlucky one to end better. Out counts as worse.
3. The rank is the share of the 10,000 that ended with a lower mean than the searched schedule.

Random schedules: shares drawn evenly, sorted over the blocks, raised to the power that meets the MACs; the last block
of a class-token model gives up its tokens, as in the search. Beside them, the schedules of ToMe (constant number),
EViT (stepwise), constant rates and the paper, under the same operator.

Cost: 10,000 short forward passes and a little more: minutes on a GPU, hours on a CPU (`--random 200`).

    python reproduce/schedule_comparison.py --random 200 --json results/schedule_comparison_embedded.json
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import setting as shared
import torch
import torch.nn.functional as F
from setting import OutOfTimeError, Setting, Table
from torch import Tensor, nn

import diffrate
from diffrate.devices import autocast
from diffrate.methods.schedules import (
    constant_number,
    constant_rate,
    published_schedule,
    random_schedules,
    stepwise,
)

FIRST = {"cpu": 32, "cuda": 128}  # images that every schedule sees
SURELY = 3.0  # standard errors
RANDOM = 10_000
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


def race(
    model: nn.Module,
    reference: diffrate.Schedule,
    schedules: Sequence[diffrate.Schedule],
    images: Tensor,
    labels: Tensor,
    check_time: Callable[[], None] = lambda: None,
) -> Race:
    """Race schedules against a reference on images in the order given."""
    sums = torch.zeros(len(schedules), 2, dtype=torch.float64)  # of the differences and their squares
    left = list(range(len(schedules)))
    entered, seen = [], []
    start, length = 0, FIRST[images.device.type]
    while start < len(images) and left:
        part = slice(start, min(start + length, len(images)))
        own = nll(model, reference, images[part], labels[part])
        for i in left:
            check_time()
            difference = nll(model, schedules[i], images[part], labels[part]) - own
            sums[i] += torch.stack([difference.sum(), difference.square().sum()]).cpu()
        entered.append(len(left))
        start = part.stop
        length = start
        seen.append(start)
        if start < len(images):
            mean = sums[left, 0] / start
            variance = (sums[left, 1] / start - mean.square()).clamp_min(0) / max(start - 1, 1)
            staying = mean <= SURELY * variance.sqrt()
            left = [i for i, stays in zip(left, staying.tolist(), strict=True) if stays]
    means = {i: float(sums[i, 0]) / start for i in left}
    best = min(means, key=lambda i: means[i]) if means else -1
    return Race(
        sum(mean < 0 for mean in means.values()),
        len(schedules),
        best,
        means.get(best, math.nan),
        entered,
        seen,
    )


@torch.inference_mode()
def nll(model: nn.Module, schedule: diffrate.Schedule, images: Tensor, labels: Tensor) -> Tensor:
    """(B,) negative log-likelihoods, in batches of a moderate size."""
    fast = diffrate.compress(model, schedule)
    parts = []
    for some, their in zip(images.split(512), labels.split(512), strict=True):
        with autocast(images.device, images.is_cuda, "float16"):
            logits = fast(some)
        parts.append(F.cross_entropy(logits.float(), their, reduction="none").double())
    return torch.cat(parts)


def run(setting: Setting, count: int = RANDOM) -> None:
    table = Table(setting, "schedule_comparison", f"Schedule comparison, {count:,} random ones", PAPER)
    images, labels = (torch.cat(parts) for parts in zip(*setting.val, strict=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(images.device)
    budget = setting.budgets[-1]
    found, _ = setting.search(budget)
    table.measure("search", found, budget=budget)
    simple = {"ToMe's counts": constant_number, "EViT's counts": stepwise, "constant rate": constant_rate}
    for name, make in simple.items():
        table.measure(name, make(setting.model, budget, found.operator), budget=budget)
    paper = replace(published_schedule(setting.model, budget), operator=found.operator)
    table.measure("the paper's counts", paper, budget=budget)
    cost = diffrate.gmacs(setting.model, found)
    drawn = random_schedules(setting.model, cost, range(count), found.operator, last_is_free=True)
    try:
        result = race(setting.model, found, drawn, images[order], labels[order], setting.check_time)
    except OutOfTimeError:
        table.add("the race", budget=budget, left_out="out of time")
        raise
    table.add(
        "the race",
        budget=budget,
        better=result.better,
        schedules=result.total,
        rank_percent=100 * result.better / result.total,
        entered=result.entered,
        images=result.images,
    )
    if result.best >= 0:
        table.measure("best random one", drawn[result.best], budget=budget, seed=result.best)


def main() -> None:
    flags = shared.parser(__doc__)
    flags.add_argument("--random", type=int, default=RANDOM, help="random schedules")
    arguments = flags.parse_args()
    try:
        run(shared.setting(arguments), arguments.random)
    except OutOfTimeError:
        print("out of time: the rows so far are saved")


if __name__ == "__main__":
    main()
