"""`diffrate profile`: measure on this machine what a model's parts take, and how well their sum predicts the whole.

Every part is timed as the compressed model runs it (`run_block`), on tokens that a real removal left behind. Then
whole models under several schedules are timed in turn, and two scales and an offset are fitted to them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from diffrate.backbones import Backbone, backbone_of
from diffrate.compressed import CompressedModel, checked_operator, compress, run_block
from diffrate.costs.macs import MacCost
from diffrate.costs.table import BlockTimes, Fit, LatencyTable, Series, TableCost
from diffrate.devices import device_name
from diffrate.errors import DiffRateError
from diffrate.methods.schedules import constant_number, stepwise
from diffrate.modes import evaluating
from diffrate.operator import Operator
from diffrate.schedule import Schedule
from diffrate.searching import fast
from diffrate.tokens import Tokens, start

WARM_UP = 5
REMOVED = 0.1  # share of the tokens that a timed removal takes
SHARES = (0.9, 0.75, 0.6, 0.45)  # of the MACs, for the schedules that check the table


def profile(
    model: nn.Module,
    batch_size: int = 64,
    *,
    device: torch.device | str = "cpu",
    operator: Operator | None = None,
    repeats: int = 30,
    name: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> LatencyTable:
    """A latency table of `model`, in its own number type, for batches of this size on this device.

    operator  how tokens will be removed: what the fast search uses, unless told otherwise.
    repeats   timed runs of each part, of which the median counts.
    """
    if repeats < 3 or batch_size < 1:
        raise DiffRateError("a profile needs a batch of at least 1 image and at least 3 repeats")
    model = model.original if isinstance(model, CompressedModel) else model
    where = torch.device(device)
    backbone = backbone_of(model.to(where))
    layout, weight = backbone.layout, next(model.parameters())
    operator = checked_operator(operator or fast.OPERATOR, layout)
    images = torch.randn(batch_size, layout.in_chans, *layout.img_size, device=where, dtype=weight.dtype)
    clock = Clock(where, repeats)
    with evaluating(model), torch.inference_mode():
        products = [backbone.block_macs(i) for i in range(layout.depth)]
        distinct = list(dict.fromkeys(products))
        kinds = []
        for kind in distinct:
            say(f"timing block {products.index(kind)} of {layout.depth} blocks, {len(distinct)} kind(s)")
            kinds.append(_block_times(backbone, products.index(kind), images, operator, clock))
        tokens = start(backbone.embed(images), layout.prefix, track=False)
        around = clock.median(lambda: backbone.embed(images))[0]
        around += clock.median(lambda: backbone.head(tokens.with_features(backbone.norm(tokens.x))))[0]
        table = LatencyTable(
            name, layout.depth, layout.dim, layout.tokens, layout.prefix, device_name(where), dtype_name(weight.dtype),
            batch_size, torch.__version__, asdict(operator), kinds, [distinct.index(p) for p in products],
            around, Fit(), [],
        )  # fmt: skip
        say("timing whole models under several schedules")
        schedules = check_schedules(model, operator)
        measured = time_models([compress(model, s) for s in schedules], images, repeats=max(10, repeats // 2))
    return _fitted(table, schedules, measured)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Clock:
    """Times a function on a device: CUDA events on a GPU, a monotonic clock elsewhere."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def median(self, run: Callable[[], object]) -> tuple[float, float]:
        """Median ms of the warmed-up runs, and the spread of their middle half."""
        for _ in range(WARM_UP):
            run()
        ms = self._events(run) if self.device.type == "cuda" else self._host(run)
        low, middle, high = statistics.quantiles(ms, n=4, method="inclusive")
        return middle, high - low

    def _events(self, run: Callable[[], object]) -> list[float]:
        pairs = []
        torch.cuda.synchronize(self.device)
        for _ in range(self.repeats):
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            run()
            after.record()
            pairs.append((before, after))
        torch.cuda.synchronize(self.device)
        return [before.elapsed_time(after) for before, after in pairs]

    def _host(self, run: Callable[[], object]) -> list[float]:
        ms = []
        for _ in range(self.repeats):
            started = time.perf_counter()
            run()
            ms.append(1e3 * (time.perf_counter() - started))
        return ms


def time_models(models: Sequence[nn.Module], images: Tensor, repeats: int = 15) -> list[float]:
    """Median ms of a batch through each model, timed in turn, so that a drift of the machine hits all alike."""
    clock = Clock(images.device, 1)
    ms: list[list[float]] = [[] for _ in models]
    with torch.inference_mode():
        for turn in range(repeats + 2):
            for i, model in enumerate(models):
                time_once = clock._events if images.device.type == "cuda" else clock._host
                taken = time_once(lambda model=model: model(images))[0]  # type: ignore[misc]
                if turn >= 2:
                    ms[i].append(taken)
    return [statistics.median(each) for each in ms]


def grid(least: int, tokens: int) -> list[int]:
    """Counts to measure: every eighth, those around multiples of 16, where kernels change, and both ends."""
    counts = set(range(8, tokens, 8)) | {n + d for n in range(16, tokens + 1, 16) for d in (-1, 0, 1)}
    return sorted({n for n in counts if least < n < tokens} | {least, tokens})


def _block_times(backbone: Backbone, i: int, images: Tensor, operator: Operator, clock: Clock) -> BlockTimes:
    layout = backbone.layout
    every = start(backbone.embed(images), layout.prefix, track=False)
    least = layout.prefix + 2  # what a removal can still take one from
    points = grid(least, layout.tokens)
    coarse = [n for n in points if n in (least, layout.tokens) or n % 16 == 0]

    def left(n: int) -> Tokens:
        """n tokens as a removal leaves them, with sizes where the operator gives them."""
        return run_block(backbone, i, every, n, n, operator) if n < layout.tokens else every

    def block(tokens: Tokens, keep: int) -> tuple[float, float]:
        return clock.median(lambda: run_block(backbone, i, tokens, keep, keep, operator))

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

    def removal(keep: Callable[[int], int]) -> Series:
        def extra(n: int) -> tuple[float, float]:
            ms, spread = block(left(n), keep(n))
            own = whole if n == layout.tokens else float(attention_ms[n])
            return max(ms - own - float(mlp_ms[keep(n)]), 0.0), spread

        return _series(coarse, extra)

    remove = removal(lambda n: max(layout.prefix + 1, n - max(1, round(REMOVED * n))))
    last = removal(lambda n: max(layout.prefix, 1))
    return BlockTimes(rise, mlps, remove, last, max(whole, 0.0))


def _series(points: Sequence[int], measure: Callable[[int], tuple[float, float]]) -> Series:
    ms, spread = zip(*map(measure, points), strict=True)
    return Series(list(points), list(ms), list(spread))


def check_schedules(model: nn.Module, operator: Operator) -> list[Schedule | None]:
    """Schedules of all kinds that the model can run: whole, falling steadily, in three steps, and in one."""
    cost = MacCost.of(model)
    backbone = backbone_of(model)
    whole = cost.of_schedule(None)
    found: list[Schedule | None] = [None]
    for share in SHARES:
        for method in (constant_number, stepwise):
            try:
                kept = method(model, share * whole).effective.merge
            except DiffRateError:  # few blocks or tokens: not every method reaches every share
                continue
            found.append(Schedule(kept, kept, backbone.layout.prefix, operator))
    tokens, depth = backbone.layout.tokens, backbone.layout.depth
    for share in (0.8, 0.5):
        few = max(backbone.layout.prefix + 1, round(share * tokens))
        kept = (tokens, *[few] * (depth - 1))
        found.append(Schedule(kept, kept, backbone.layout.prefix, operator))
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
