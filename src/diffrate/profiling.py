"""`diffrate profile`: measure on this machine what a model's parts take, and how well their sum predicts the whole.

Every part is timed as the compressed model runs it (`run_block`), on tokens such as a removal leaves behind. Then
whole models under several schedules are timed in turn, and two scales and an offset are fitted to them. Parts and
whole models are timed in one mode: eager, or each recorded as a CUDA graph. Eager kernels of a small batch may take
longer to launch than to run; launching overlaps with what ran before, so that times of parts do not add up.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from diffrate import graphs, kernels
from diffrate.backbones import Backbone, Layout, backbone_of
from diffrate.blocks import run_block, run_block_for_prefix
from diffrate.compressed import CompressedModel, checked_operator, compress, with_kernels
from diffrate.costs.macs import MacCost
from diffrate.costs.table import BlockTimes, Fit, LatencyTable, Series, TableCost
from diffrate.devices import device_name, now
from diffrate.errors import DiffRateError
from diffrate.methods.schedules import constant_number, stepwise
from diffrate.modes import evaluating
from diffrate.operator import Operator
from diffrate.schedule import Schedule
from diffrate.searching import fast
from diffrate.tokens import Tokens

MODES = ("eager", "graph")
WARM_UP = 5
SETTLE_SECONDS = 1.0  # of work before a GPU is timed, until its clock is that of sustained load
REMOVED = 0.1  # share of the tokens that a timed removal takes
SHARES = (0.9, 0.75, 0.6, 0.45)  # of the MACs, for the schedules that check the table


def profile(
    model: nn.Module,
    batch_size: int = 64,
    *,
    device: torch.device | str = "cpu",
    operator: Operator | None = None,
    repeats: int = 30,
    mode: str = "eager",
    name: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> LatencyTable:
    """A latency table of `model`, in its own number type, for batches of this size on this device.

    operator  how tokens will be removed: what the fast search uses, unless told otherwise.
    repeats   timed runs of each part, of which the median counts.
    mode      "eager", or "graph": as CUDA graphs, for a model that will be served as one.
    """
    if repeats < 3 or batch_size < 1:
        raise DiffRateError("a profile needs a batch of at least 1 image and at least 3 repeats")
    model = model.original if isinstance(model, CompressedModel) else model
    where = torch.device(device)
    check_mode(mode, where)
    backbone = backbone_of(model.to(where))
    layout, weight = backbone.layout, next(model.parameters())
    operator = checked_operator(operator or fast.OPERATOR, layout)
    images = torch.randn(batch_size, layout.in_chans, *layout.img_size, device=where, dtype=weight.dtype)
    clock = Clock(where, repeats, mode)
    with evaluating(model), torch.inference_mode():
        settle([lambda: model(images)], where)
        products = [backbone.block_macs(i) for i in range(layout.depth)]
        distinct = list(dict.fromkeys(products))
        kinds = []
        for kind in distinct:
            say(f"timing block {products.index(kind)} of {layout.depth} blocks, {len(distinct)} kind(s)")
            kinds.append(_block_times(backbone, products.index(kind), images, operator, clock))
        last = _last_block(backbone, images, operator, clock) if layout.compresses_last_block else None
        tokens = backbone.start(images)
        with kernels.embedding(images):  # as compressed models have it
            around = clock.median(lambda: backbone.embed(images))[0]
        around += clock.median(lambda: backbone.head(tokens.with_features(backbone.norm(tokens.x))))[0]
        table = LatencyTable(
            name, layout.depth, layout.dim, layout.tokens, layout.prefix, device_name(where), dtype_name(weight.dtype),
            batch_size, mode, torch.__version__, asdict(operator), kinds, [distinct.index(p) for p in products],
            last, around, Fit(), [],
        )  # fmt: skip
        say("timing whole models under several schedules")
        schedules = check_schedules(model, operator)
        models = [under(model, s, operator) for s in schedules]
        measured = time_models(models, images, repeats=max(10, repeats // 2), mode=mode)
    return _fitted(table, schedules, measured)


def under(model: nn.Module, schedule: Schedule | None, operator: Operator) -> CompressedModel:
    """A model to be timed whole. Without a schedule it has all kernels too: a table has one price for a block."""
    return with_kernels(model, operator) if schedule is None else compress(model, schedule)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_mode(mode: str, device: torch.device) -> None:
    if mode not in MODES:
        raise DiffRateError(f"a profile's mode is one of {', '.join(MODES)}, not {mode!r}")
    if mode == "graph" and device.type != "cuda":
        raise DiffRateError("mode graph needs a CUDA device")


class Clock:
    """Times a function on a device: CUDA events on a GPU, a monotonic clock elsewhere."""

    def __init__(self, device: torch.device, repeats: int, mode: str = "eager") -> None:
        self.device, self.repeats, self.mode = device, repeats, mode

    def median(self, run: Callable[[], object]) -> tuple[float, float]:
        """Median ms of the warmed-up runs, and the spread of their middle half."""
        ms = self.times(self.prepared(run), self.repeats)
        low, middle, high = statistics.quantiles(ms, n=4, method="inclusive")
        return middle, high - low

    def prepared(self, run: Callable[[], object]) -> Callable[[], object]:
        """The function, warmed up; in mode graph a recording, which `run` must outlive."""
        if self.device.type != "cuda":
            for _ in range(WARM_UP):
                run()
            return run
        graphs.warm_up(run, self.device, WARM_UP)
        return graphs.recorded(run) if self.mode == "graph" else run

    def times(self, run: Callable[[], object], repeats: int) -> list[float]:
        """ms of each of so many runs."""
        return self._events(run, repeats) if self.device.type == "cuda" else self._host(run, repeats)

    def _events(self, run: Callable[[], object], repeats: int) -> list[float]:
        pairs = []
        torch.cuda.synchronize(self.device)
        for _ in range(repeats):
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            run()
            after.record()
            pairs.append((before, after))
        torch.cuda.synchronize(self.device)
        return [before.elapsed_time(after) for before, after in pairs]

    def _host(self, run: Callable[[], object], repeats: int) -> list[float]:
        ms = []
        for _ in range(repeats):
            started = time.perf_counter()
            run()
            ms.append(1e3 * (time.perf_counter() - started))
        return ms


def settle(runs: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Work for a second where the clock depends on it: on a GPU."""
    until = now(device) + (SETTLE_SECONDS if device.type == "cuda" else 0.0)
    while now(device) < until:
        for run in runs:
            run()


def time_models(
    models: Sequence[nn.Module], images: Tensor, repeats: int = 15, mode: str = "eager"
) -> list[float]:
    """Median ms of a batch through each model, timed in turn, so that a drift of the machine hits all alike."""
    check_mode(mode, images.device)
    clock = Clock(images.device, repeats, mode)
    with torch.inference_mode():
        runs = [functools.partial(model, images) for model in models]
        ready = [clock.prepared(run) for run in runs]
        ms: list[list[float]] = [[] for _ in models]
        settle(ready, images.device)
        for _ in range(repeats):
            for i, run in enumerate(ready):
                ms[i] += clock.times(run, 1)
    return [statistics.median(each) for each in ms]


def held_against(
    table: LatencyTable, model: nn.Module, schedules: Sequence[Schedule | None], repeats: int = 30
) -> list[dict[str, Any]]:
    """What the table says of a model under each schedule, and what it takes now; the model is on its device.

    None is the whole model, with the kernels that compressed ones have.
    """
    layout, weight = backbone_of(model).layout, next(model.parameters())
    shape = (table.batch_size, layout.in_chans, *layout.img_size)
    images = torch.randn(shape, device=weight.device, dtype=weight.dtype)
    operator, cost = Operator.from_dict(table.operator), TableCost(table)
    models = [under(model, each, operator) for each in schedules]
    with evaluating(model):
        measured = time_models(models, images, repeats, table.mode)
    return [
        {
            "kept": list(each.kept),
            "predicted_ms": cost.price_of(schedule)["latency_ms"],
            "measured_ms": ms,
        }
        for each, schedule, ms in zip(models, schedules, measured, strict=True)
    ]


def grid(least: int, tokens: int) -> list[int]:
    """Counts to measure: every eighth, those around multiples of 16, where kernels change, and both ends."""
    counts = set(range(8, tokens, 8)) | {n + d for n in range(16, tokens + 1, 16) for d in (-1, 0, 1)}
    return sorted({n for n in counts if least < n < tokens} | {least, tokens})


def _block_times(backbone: Backbone, i: int, images: Tensor, operator: Operator, clock: Clock) -> BlockTimes:
    layout = backbone.layout
    left = _removed(backbone, i, images, operator)
    points = grid(_least(layout), layout.tokens)
    coarse = _coarse(layout)

    def block(tokens: Tokens, keep: int) -> tuple[float, float]:
        prune = after_pruning(tokens.count, keep, operator)
        return clock.median(lambda: run_block(backbone, i, tokens, prune, keep, operator))

    def mlp(n: int) -> tuple[float, float]:
        x = left(n).x
        return clock.median(lambda: backbone.mlp(i, x))

    mlps = _series([max(layout.prefix, 1), *points], mlp)
    mlp_ms = mlps.every_count(layout.tokens)
    blocks = {n: block(left(n), n) for n in points}
    whole = blocks.pop(layout.tokens)[0] - float(mlp_ms[layout.tokens])
    attention = [(n, ms - float(mlp_ms[n]), spread) for n, (ms, spread) in blocks.items()]
    rise = Series(*map(list, zip(*attention, strict=True)))
    attention_ms = rise.every_count(layout.tokens)

    def removal(n: int) -> tuple[float, float]:
        keep = max(layout.prefix + 1, n - max(1, round(REMOVED * n)))
        ms, spread = block(left(n), keep)
        own = whole if n == layout.tokens else float(attention_ms[n])
        return max(ms - own - float(mlp_ms[keep]), 0.0), spread

    return BlockTimes(rise, mlps, _series(coarse, removal), max(whole, 0.0))


def _last_block(backbone: Backbone, images: Tensor, operator: Operator, clock: Clock) -> Series:
    """The last block where only the prefix goes on, with its MLP."""
    i = backbone.layout.depth - 1
    left = _removed(backbone, max(i - 1, 0), images, operator)  # with the norm that comes next

    def short(n: int) -> tuple[float, float]:
        tokens = left(n)
        return clock.median(lambda: run_block_for_prefix(backbone, i, tokens, operator))

    return _series(_coarse(backbone.layout), short)


def _removed(backbone: Backbone, i: int, images: Tensor, operator: Operator) -> Callable[[int], Tokens]:
    """Makes n tokens such as a removal leaves: with sizes where the operator gives them. Time knows no features.

    All tokens are such as block i leaves where it removes none.
    """
    every = backbone.start(images)
    count = backbone.layout.tokens
    ongoing = run_block(backbone, i, every, count, count, operator)
    fewer = run_block(backbone, i, every, after_pruning(count, count - 1, operator), count - 1, operator)

    def left(n: int) -> Tokens:
        if n == count:
            return ongoing
        first = torch.arange(n, device=images.device).expand(len(images), -1)
        return replace(
            fewer,
            x=fewer.x[:, :n].contiguous(),
            size=None if fewer.size is None else fewer.size[:, :n].contiguous(),
            log_size=None if fewer.log_size is None else fewer.log_size[:, :n],
            normed=None if fewer.normed is None else fewer.normed[:, :n].contiguous(),
            length=None,
            patches=None if fewer.patches is None else fewer.patches.clamp(-n, n - 1),
            positions=None if fewer.positions is None else fewer.positions.taken(first),
        )

    return left


def after_pruning(before: int, keep: int, operator: Operator) -> int:
    """How many tokens pruning leaves in what is timed: where the operator merges too, half of what goes is merged."""
    return keep + (before - keep + 1) // 2 if operator.splits else keep


def _least(layout: Layout) -> int:
    return layout.prefix + 2  # what a removal can still take one from


def _coarse(layout: Layout) -> list[int]:
    """Counts for what changes little with them."""
    least, tokens = _least(layout), layout.tokens
    return [n for n in grid(least, tokens) if n in (least, tokens) or n % 16 == 0]


def _series(points: Sequence[int], measure: Callable[[int], tuple[float, float]]) -> Series:
    ms, spread = zip(*map(measure, points), strict=True)
    return Series(list(points), list(ms), list(spread))


def check_schedules(model: nn.Module, operator: Operator) -> list[Schedule | None]:
    """Schedules of all kinds that the model can run: whole, falling steadily, in three steps, and in one."""
    cost = MacCost.of(model)
    layout = backbone_of(model).layout
    whole = cost.of_schedule(None)
    found: list[Schedule | None] = [None]

    def add(kept: tuple[int, ...]) -> None:
        before = (layout.tokens, *kept[:-1])
        prune = tuple(after_pruning(*each, operator) for each in zip(before, kept, strict=True))
        found.append(Schedule(prune, kept, layout.prefix, operator))

    for share in SHARES:
        for method in (constant_number, stepwise):
            try:
                kept = method(model, share * whole).effective.merge
            except DiffRateError:  # few blocks or tokens: not every method reaches every share
                continue
            add(kept)
    for share in (0.8, 0.5):
        few = max(layout.prefix + 1, round(share * layout.tokens))
        add((layout.tokens, *[few] * (layout.depth - 1)))
    return found


def _fitted(
    table: LatencyTable, schedules: Sequence[Schedule | None], measured: Sequence[float]
) -> LatencyTable:
    """The table with scales and offset that fit whole models best, relative to their times, and those times."""
    cost = TableCost(table)
    kept = torch.tensor(
        [[table.tokens] * table.depth if s is None else s.effective.merge for s in schedules],
        dtype=torch.float64,
    )
    blocks, removals = cost.sums(kept)
    times = torch.tensor(measured, dtype=torch.float64)
    terms = torch.stack([blocks, removals, torch.ones_like(blocks)], dim=1) / times[:, None]
    solution = _not_negative(terms, torch.ones_like(times))
    fit = Fit(*(float(v) for v in solution))
    predicted = fit.blocks * blocks + fit.removals * removals + fit.offset
    checks = [
        {
            "kept": [int(n) for n in row],
            "parts_ms": float(b + r),
            "predicted_ms": float(p),
            "measured_ms": float(t),
        }
        for row, b, r, p, t in zip(kept, blocks, removals, predicted, times, strict=True)
    ]
    return replace(table, fit=fit, checks=checks)


def _not_negative(terms: Tensor, wanted: Tensor) -> Tensor:
    """Least squares with the scales at least 0: terms that would be negative are left out."""
    used = list(range(terms.shape[1]))
    while True:
        part = torch.linalg.lstsq(terms[:, used], wanted[:, None]).solution[:, 0]
        negative = [i for i, v in zip(used, part.tolist(), strict=True) if v < 0 and i != 2]
        if not negative:
            solution = torch.zeros(terms.shape[1], dtype=terms.dtype)
            solution[used] = part
            return solution
        used = [i for i in used if i not in negative]
