"""What a search step costs, against a plain forward and backward pass of the same frozen model in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffrate.backbones import Backbone, backbone_of
from diffrate.compressed import checked_operator
from diffrate.costs.macs import MacCost
from diffrate.devices import autocast, now
from diffrate.errors import DiffRateError
from diffrate.modes import frozen
from diffrate.outputs import main_output
from diffrate.portions import Portions, largest_that_fits
from diffrate.searching import fast, paper
from diffrate.searching.budget import Space
from diffrate.searching.split import even_split
from diffrate.searching.starts import Start, starts
from diffrate.searching.subject import Subject

WARM_UP = 3  # untimed rounds


@dataclass(frozen=True)
class StepTime:
    """Median milliseconds of a step with the spread of the middle half, and peak memory above the model's own."""

    name: str
    ms: float
    spread_ms: float
    peak_gib: float | None  # None where the device does not tell
    batch_size: int


def bench_search(
    model: nn.Module,
    batch_size: int = 256,
    budget_share: float = 0.6,
    device: torch.device | str = "cpu",
    amp: bool = False,
    amp_dtype: str = "float16",
    repeats: int = 20,
) -> list[StepTime]:
    """Time a plain forward+backward and a step of each recipe on random images and labels, in turns.

    A batch for which there is no memory is halved until there is.
    """
    where = torch.device(device)
    classes = int(getattr(model, "num_classes", 0))
    if classes < 1:
        raise DiffRateError("the model has no classifier, so its search steps cannot be timed")
    model.to(where)

    def timed(batch_size: int) -> list[StepTime]:
        return _timed(model, batch_size, budget_share, classes, where, amp, amp_dtype, repeats)

    return largest_that_fits(timed, batch_size, "what is timed")


def _timed(
    model: nn.Module,
    batch_size: int,
    budget_share: float,
    classes: int,
    where: torch.device,
    amp: bool,
    amp_dtype: str,
    repeats: int,
) -> list[StepTime]:
    with frozen(model):
        runs = _runs(model, batch_size, budget_share, classes, 10 * repeats, where)
        times: dict[str, list[float]] = {name: [] for name in runs}
        peaks: dict[str, float] = {}
        for repeat in range(repeats + WARM_UP):
            for name, run in runs.items():
                seconds, peak = _measured(run, where, amp, amp_dtype)
                if repeat >= WARM_UP:
                    times[name].append(1000 * seconds)
                if peak is not None:
                    peaks[name] = max(peak, peaks.get(name, 0.0))  # a replayed graph allocates only once
    return [
        StepTime(name, statistics.median(ms), _spread(ms), peaks.get(name), batch_size)
        for name, ms in times.items()
    ]


def _runs(
    model: nn.Module, batch_size: int, share: float, classes: int, steps: int, device: torch.device
) -> dict[str, Callable[[], object]]:
    backbone = backbone_of(model)
    layout = backbone.layout
    space = Space.of(backbone, MacCost.of_backbone(backbone))
    budget = share * space.cost.price_of(None)["gmacs"]
    images = torch.randn(batch_size, layout.in_chans, *layout.img_size, device=device)
    labels = torch.randint(0, classes, (batch_size,), device=device)

    def alone(sums: Tensor) -> Tensor:
        return sums

    by_masks = paper.PaperRecipe(model, space, checked_operator(paper.OPERATOR, layout), budget, steps, alone)
    start = Start(starts(space, budget)[0], even_split(space))
    by_slopes = fast.FastRecipe(
        Subject(model), space, checked_operator(fast.OPERATOR, layout), budget, steps, start, 0, alone
    )
    by_masks.portions = by_slopes.portions = Portions("", splits=False)  # all three are of one batch
    return {
        "plain forward + backward": lambda: plain_step(backbone, images, labels),
        "paper recipe step": lambda: by_masks.step(images, labels),
        "fast recipe step": lambda: by_slopes.step(images, labels),
    }


def _measured(
    run: Callable[[], object], device: torch.device, amp: bool, amp_dtype: str
) -> tuple[float, float | None]:
    """Seconds and, on a GPU, peak GiB above what was in use."""
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    started = now(device)
    with autocast(device, amp, amp_dtype):
        run()
    seconds = now(device) - started
    if device.type != "cuda":
        return seconds, None
    return seconds, (torch.cuda.max_memory_allocated(device) - before) / 2**30


def plain_step(backbone: Backbone, images: Tensor, labels: Tensor) -> None:
    """Forward and backward to the tokens of the first block: all that a frozen model can be asked for."""
    tokens = backbone.start(images)
    x = tokens.x.detach().requires_grad_(True)
    y = x
    for i in range(backbone.layout.depth):
        y = backbone.block(i, y, tokens.positions)
    logits = main_output(backbone.head(tokens.with_features(backbone.norm(y))))
    nn.functional.cross_entropy(logits.float(), labels).backward()


def _spread(values: list[float]) -> float:
    low, _, high = statistics.quantiles(values, n=4)
    return high - low
