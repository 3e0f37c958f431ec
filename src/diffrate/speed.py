"""How fast a model is under a schedule, between two bounds that are measured in the same run.

The uncompressed model is what compression must beat; the oracle slice is the ceiling: the same model with the same
counts that keeps the first tokens, whatever they are, so that it pays for no ranking and no merging.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diffrate import graphs, kernels, methods
from diffrate.backbones import backbone_of
from diffrate.compressed import checked, compress, with_kernels
from diffrate.costs.macs import MacCost
from diffrate.devices import now
from diffrate.errors import DiffRateError
from diffrate.mixing import mix
from diffrate.portions import largest_that_fits
from diffrate.schedule import Schedule
from diffrate.steps import MARK, STEPS

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MODES = ("eager", "compiled", "graph", "compiled-graph")
UNCOMPRESSED, ORACLE, BY_PRODUCT = "uncompressed", "oracle slice", ", patches by product"
WITH_KERNELS = f"{UNCOMPRESSED}, with our kernels"  # all that is faster there without removing a token
WARM_UP = 3  # untimed calls
LEAST_SECONDS = 0.02  # of one sample: shorter calls are timed several at once


@dataclass(frozen=True)
class Speed:
    """One model, one mode, one batch size: medians of samples taken in turns with the rows they are compared with.

    of_uncompressed, of_oracle  throughput as a ratio to those rows of the same run; an oracle slice belongs to one
                                schedule, and only that schedule's row is compared with it.
    saved_share  time saved as a share of the MACs saved: 1 where the model is faster by all that it computes less.
    """

    name: str
    mode: str
    batch_size: int
    dtype: str
    gmacs: float
    ms: float
    spread_ms: float  # of the middle half
    images_per_second: float
    peak_gib: float | None  # above the weights; None where the device does not tell
    of_uncompressed: float | None = None
    of_oracle: float | None = None
    saved_share: float | None = None


class OracleSlice(nn.Module):
    """The model under a schedule that simply cuts `x[:, :k]` after attention, with torch's own attention."""

    def __init__(self, model: nn.Module, schedule: Schedule) -> None:
        super().__init__()
        self.original = model
        self.backbone = backbone_of(model)
        self.kept = checked(schedule, self.backbone.layout).effective.merge

    def forward(self, images: Tensor) -> Any:
        backbone, tokens = self.backbone, self.backbone.start(images)
        for i, keep in enumerate(self.kept):
            if keep == tokens.count and backbone.runs_whole(tokens.positions):
                tokens = tokens.with_features(backbone.block(i, tokens.x, tokens.positions))
                continue
            attention = backbone.open_attention(i, tokens.x, tokens.positions)
            x = backbone.close_attention(i, tokens.x, mix(attention, attention.bias))[:, :keep]
            positions = tokens.positions
            if positions is not None:
                positions = positions.taken(torch.arange(keep, device=x.device).expand(x.shape[0], -1))
            tokens = replace(tokens, x=backbone.mlp(i, x), positions=positions)
        if tokens.patches is not None:  # the grid is restored: what was cut takes the last token
            tokens = replace(tokens, patches=tokens.patches.clamp_max(tokens.count - 1))
        return backbone.head(tokens.with_features(backbone.norm(tokens.x)))


class PatchesByProduct(nn.Module):
    """Another model that cuts images into patches in the way compressed models do, to see what that alone gives."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Any:
        with kernels.embedding(images):
            return self.model(images)


@dataclass(frozen=True)
class Entrant:
    """A row to be: a model, what it costs, and the row that is its ceiling.

    eager  run as it is in every mode: what it keeps depends on the images, which no recording knows.
    """

    name: str
    model: nn.Module
    gmacs: float
    oracle: str | None = None
    eager: bool = False

    def mode(self, mode: str) -> str:
        """How it runs where others run in this mode."""
        return "eager" if self.eager else mode


def entrants(
    model: nn.Module, schedules: Mapping[str, Schedule], baselines: bool = False, products: bool = False
) -> list[Entrant]:
    """The uncompressed model and, for each schedule, its oracle slice, the compressed model and rivals.

    products  also the first two with their patches cut by a product, as those of compressed models are on a GPU, and
              the uncompressed model with all kernels that compressed ones have there.
    """
    cost = MacCost.of(model)
    whole = cost.of_schedule(None)
    rows = [Entrant(UNCOMPRESSED, model, whole)]
    if products:
        rows.append(Entrant(f"{UNCOMPRESSED}{BY_PRODUCT}", PatchesByProduct(model), whole))
        rows.append(Entrant(WITH_KERNELS, with_kernels(model), whole))
    for name, schedule in schedules.items():
        gmacs = cost.of_schedule(schedule)
        oracle = ORACLE if len(schedules) == 1 else f"{ORACLE}, {name}"
        sliced = OracleSlice(model, schedule)
        rows.append(Entrant(oracle, sliced, gmacs))
        if products:
            rows.append(Entrant(f"{oracle}{BY_PRODUCT}", PatchesByProduct(sliced), gmacs))
        rows.append(Entrant(name, compress(model, schedule), gmacs, oracle))
        if baselines:
            for label, method in {"ToMe": "tome", "EViT": "evit"}.items():
                label = label if len(schedules) == 1 else f"{label}, {name}"
                rival = methods.build(method, model, gmacs)
                rows.append(Entrant(label, rival, methods.cost_of(rival)))
    return rows


def bench(
    model: nn.Module,
    schedules: Mapping[str, Schedule] | None = None,
    batch_sizes: Sequence[int] = (64,),
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    modes: Sequence[str] = ("eager",),
    baselines: bool = False,
    repeats: int = 10,
    path: str = "auto",
    products: bool = False,
    gate: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[list[Speed]]:
    """Time a model and its schedules on random images: one list of rows for each batch size and mode.

    A batch for which there is no memory is halved until there is; the rows say of how many images they are.

    path      which kernels run: see diffrate.kernels.using.
    products  also baselines with their patches cut by a product: see entrants.
    gate      entered for each timing, when all rows of it are ready.
    """
    where = torch.device(device)
    if dtype not in DTYPES:
        raise DiffRateError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    for mode in modes:
        check_mode(mode, where)
    lent = copy.deepcopy(model).to(where, DTYPES[dtype]).eval()  # the caller's model stays as it is
    rows = entrants(lent, schedules or {}, baselines, products)
    layout = backbone_of(lent).layout
    with kernels.using(path):

        def timed(batch_size: int, mode: str) -> list[Speed]:
            shape = (batch_size, layout.in_chans, *layout.img_size)
            images = torch.randn(shape, device=where, dtype=DTYPES[dtype])
            return time_rows(rows, images, mode, dtype, repeats, gate)

        for batch_size in batch_sizes:
            for mode in modes:
                yield largest_that_fits(partial(timed, mode=mode), batch_size, "what is timed")


def check_mode(mode: str, device: torch.device) -> None:
    """A DiffRateError for a mode that there is not, or not on this device."""
    if mode not in MODES:
        raise DiffRateError(f"a mode is one of {', '.join(MODES)}, not {mode!r}")
    if "graph" in mode and device.type != "cuda":
        raise DiffRateError(f"mode {mode} needs a CUDA device")


def time_rows(
    rows: Sequence[Entrant],
    images: Tensor,
    mode: str = "eager",
    dtype: str = "float32",
    repeats: int = 10,
    gate: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Speed]:
    """Time models on a batch of images, both of one type, in turns; the first is the uncompressed one."""
    return compared(rows, _measure(rows, images, mode, repeats, gate), len(images), mode, dtype)


def _measure(
    rows: Sequence[Entrant],
    images: Tensor,
    mode: str,
    repeats: int,
    gate: Callable[[], AbstractContextManager[Any]],
) -> dict[str, tuple[list[float], float | None]]:
    """Seconds a call of every entrant, in turns; and peak GiB."""
    device = images.device
    peaks: dict[str, float | None] = {}
    if mode.startswith("compiled"):
        torch._dynamo.reset()
    many = torch._dynamo.config.patch(recompile_limit=8 * len(rows))  # rows share the code of a class
    with torch.inference_mode(), many:
        runs: dict[str, Callable[[], Any]] = {}
        for row in rows:
            runs[row.name], peaks[row.name] = _prepared(row.model, images, row.mode(mode))
        with gate():
            samples = in_turns(runs, repeats, device)
    return {name: (seconds, peaks[name]) for name, seconds in samples.items()}


def in_turns(
    runs: Mapping[str, Callable[[], Any]], repeats: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds a call of each of `runs`, one after the other and over again, so that a busy machine slows them alike."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    calls: dict[str, int] = {}
    with _uncollected():
        for name, run in runs.items():
            once = min(_seconds(run, 1, device) for _ in range(WARM_UP))
            calls[name] = max(1, math.ceil(LEAST_SECONDS / once))
        for _ in range(repeats):
            for name, run in runs.items():
                samples[name].append(_seconds(run, calls[name], device) / calls[name])
    return samples


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected within: that takes milliseconds of a process that has compiled models, now and then."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _seconds(run: Callable[[], Any], calls: int, device: torch.device) -> float:
    started = now(device)
    for _ in range(calls):
        run()
    return now(device) - started


def _prepared(model: nn.Module, images: Tensor, mode: str) -> tuple[Callable[[], Any], float | None]:
    """A call of the model in this mode, warmed up, and the peak memory of one call in GiB."""
    forward: Callable[[Tensor], Any] = model
    if mode.startswith("compiled"):
        # One compilation for each batch size, as for a server with fixed batches; every row gets the same.
        forward = torch.compile(model, fullgraph=True, dynamic=False)
    device = images.device
    if device.type != "cuda":
        for _ in range(WARM_UP):
            forward(images)
        return lambda: forward(images), None

    def run() -> Any:
        return forward(images)

    graphs.warm_up(run, device, WARM_UP)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    if mode.endswith("graph"):
        run = graphs.recorded(run)
    else:
        run()
    torch.cuda.synchronize(device)
    return run, (torch.cuda.max_memory_allocated(device) - before) / 2**30


def compared(
    rows: Sequence[Entrant],
    measured: Mapping[str, tuple[list[float], float | None]],
    batch_size: int,
    mode: str,
    dtype: str,
) -> list[Speed]:
    """Rows of (seconds, peak GiB) by name as ratios to the first one, and to their ceilings."""
    medians = {name: statistics.median(seconds) for name, (seconds, _) in measured.items()}
    whole = rows[0]
    speeds = []
    for row in rows:
        seconds, peak = measured[row.name]
        saved = 1 - row.gmacs / whole.gmacs
        median = medians[row.name]
        speeds.append(
            Speed(
                name=row.name,
                mode=row.mode(mode),
                batch_size=batch_size,
                dtype=dtype,
                gmacs=row.gmacs,
                ms=1000 * median,
                spread_ms=1000 * _spread(seconds),
                images_per_second=batch_size / median,
                peak_gib=peak,
                of_uncompressed=medians[whole.name] / median,
                of_oracle=None if row.oracle is None else medians[row.oracle] / median,
                saved_share=(1 - median / medians[whole.name]) / saved if saved > 0 else None,
            )
        )
    return speeds


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


def profile(
    model: nn.Module,
    schedule: Schedule | None = None,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    path: str = "auto",
    calls: int = 3,
) -> dict[str, float]:
    """Milliseconds of one eager forward pass in each step of the walk, and what lies in none of them."""
    where = torch.device(device)
    lent = copy.deepcopy(model).to(where, DTYPES[dtype]).eval()
    compressed = compress(lent, schedule)
    layout = compressed.backbone.layout
    images = torch.randn(batch_size, layout.in_chans, *layout.img_size, device=where, dtype=DTYPES[dtype])
    watched = [torch.profiler.ProfilerActivity.CPU]
    if where.type == "cuda":
        watched.append(torch.profiler.ProfilerActivity.CUDA)
    with kernels.using(path), torch.inference_mode():
        for _ in range(WARM_UP):
            compressed(images)
        now(where)
        with torch.profiler.profile(activities=watched, acc_events=True) as profiler:
            started = now(where)
            for _ in range(calls):
                compressed(images)
            total = 1000 * (now(where) - started) / calls
    times = dict.fromkeys(STEPS, 0.0)
    for event in profiler.key_averages():
        name = event.key.removeprefix(MARK)
        if event.key.startswith(MARK) and event.device_type == torch.autograd.DeviceType.CPU:
            spent = event.device_time_total if where.type == "cuda" else event.cpu_time_total
            times[name] += spent / 1000 / calls
    times["the rest"] = max(0.0, total - sum(times.values()))
    return times
