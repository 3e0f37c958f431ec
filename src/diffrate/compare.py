"""Several methods at several budgets on the same images: equal MACs, paired differences, and how sure they are.

Every model runs on every batch, in turns. Each row is compared with the uncompressed model and with the first method
of its budget, image by image. Speed is timed as `diffrate bench` does it, all rows in turns in one run, on images of
the set: what some methods keep depends on them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from diffrate import kernels
from diffrate.compressed import CompressedModel, compress, with_kernels
from diffrate.costs.macs import gmacs
from diffrate.errors import DiffRateError
from diffrate.evaluate import Comparison, Evaluation, compare_evaluations, evaluate_in_turn
from diffrate.methods import build, cost_of, named, settings_of
from diffrate.methods.by_image import ImageCosts, Spread, decides_by_image, spread_images
from diffrate.methods.fit import TOLERANCE, asks_for_nothing, off_budget, spends_all
from diffrate.methods.resolution import LowerResolution
from diffrate.portions import largest_that_fits
from diffrate.schedule import Schedule
from diffrate.searching.budget import parse_gmacs
from diffrate.speed import (
    DTYPES,
    UNCOMPRESSED,
    WITH_KERNELS,
    Entrant,
    Speed,
    check_mode,
    time_rows,
)

AT_ONCE = 64  # images, while costs are measured
NUMBERS = ("top1", "top5", "loss", "images")
UNSTEADY = 0.1  # of the time: a wider spread is said


@dataclass(frozen=True)
class Row:
    """One method at one budget."""

    method: str
    budget: float
    gmacs: float
    evaluation: Evaluation
    to_whole: Comparison
    to_first: Comparison | None  # the first method of this budget; None in its own row
    settings: Mapping[str, Any]
    note: str = ""
    speed: Speed | None = None  # None where it was not timed

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "budget": self.budget,
            "gmacs": self.gmacs,
            **{name: getattr(self.evaluation, name) for name in NUMBERS},
            "to_uncompressed": asdict(self.to_whole),
            "to_first": None if self.to_first is None else asdict(self.to_first),
            "note": self.note,
            "speed": None if self.speed is None else asdict(self.speed),
            "settings": dict(self.settings),
        }


@dataclass(frozen=True)
class Compared:
    """The uncompressed model, the rows in order of falling budget, and what could not be built or timed."""

    whole: Evaluation
    gmacs: float
    rows: list[Row]
    left_out: list[str]
    # Of the uncompressed model, and of the same with all that makes compressed models faster on a GPU but for fewer
    # tokens; None where nothing was timed.
    speed: Speed | None = None
    with_kernels: Speed | None = None

    def to_dict(self) -> dict[str, Any]:
        whole = {name: getattr(self.whole, name) for name in NUMBERS}
        return {
            "uncompressed": {
                "gmacs": self.gmacs,
                **whole,
                "speed": None if self.speed is None else asdict(self.speed),
                "speed_with_kernels": None if self.with_kernels is None else asdict(self.with_kernels),
            },
            "rows": [row.to_dict() for row in self.rows],
            "left_out": self.left_out,
        }


def compare(
    model: nn.Module,
    loader: Iterable[Any],
    methods: Sequence[str] = (),
    budgets: str | Sequence[float] = (),
    schedules: Mapping[str, Schedule | Sequence[Schedule]] | None = None,
    *,
    trained: Mapping[str, CompressedModel | Sequence[CompressedModel]] | None = None,
    search_data: Any = None,
    device: str | torch.device = "cpu",
    amp: bool = False,
    amp_dtype: str = "float16",
    seed: int = 0,
    speed: bool = True,
    mode: str = "eager",
    batch_size: int = 64,
    progress: bool = True,
) -> Compared:
    """Evaluate methods at budgets, and schedules and trained models at their own cost, beside the uncompressed model.

    loader     batches of images and labels; it is read twice where a method measures its own cost.
    methods    names from `diffrate methods`. Each row is compared with the first one of its budget.
    budgets    GMACs, or text such as "0.8G,60%", below what the whole model costs; without any, the costs of the
               schedules.
    schedules  further rows: a name and a schedule each, or one for each of some budgets. They come before the methods
               of the budget that they meet.
    trained    the same with models that have weights of their own, such as methods.trained.read_trained returns.
    speed      also time every row, with `batch_size` images spread over the set; with amp, all in that type.
    mode       in which rows are timed, as in bench; those that have no one graph run eager, and say so.
    """
    whole = gmacs(model)
    if speed:
        check_mode(mode, torch.device(device))
    for name in methods:
        named(name)
    names = [*methods, *(schedules or {}), *(trained or {})]
    if len(set(names)) < len(names):
        raise DiffRateError("give each method and schedule once, and no two of them one name")
    model.to(torch.device(device))
    given = [(name, compress(model, each)) for name, each in _one_by_one(schedules)] + _one_by_one(trained)
    images = None
    if any(decides_by_image(each) for _, each in given):
        images = spread_images(loader).to(torch.device(device))
    costs = [_cost(each, images) for _, each in given]
    wanted = _budgets(budgets, whole, costs)
    built: dict[tuple[str, float], nn.Module] = {}
    left_out: list[str] = []
    for (name, each), cost in zip(given, costs, strict=True):
        nearest = min(wanted, key=lambda budget: abs(budget - cost))
        if abs(cost - nearest) > TOLERANCE * nearest:
            raise DiffRateError(f"{name} costs {cost:.4g} GMACs, which is none of the budgets")
        if (name, nearest) in built:
            raise DiffRateError(f"two of the name {name} meet the budget of {nearest:.4g} GMACs")
        built[name, nearest] = each
    met = {budget for _, budget in built}
    for budget in wanted:
        if spends_all(budget, whole) and budget not in met:
            raise asks_for_nothing(budget, whole)
    if images is None and "ats" in methods:
        images = spread_images(loader).to(torch.device(device))
    for budget in wanted:
        for name in methods:
            try:
                if spends_all(budget, whole):
                    raise asks_for_nothing(budget, whole)
                built[name, budget] = build(name, model, budget, images, search_data, seed)
            except DiffRateError as error:
                left_out.append(f"{name} at {budget:.4g} GMACs: {error}")
    if not built:
        reasons = "; ".join(left_out)
        raise DiffRateError(f"there is nothing to compare: {reasons or 'give methods or schedules'}")
    timed = batch_size if speed else None
    return _measured(model, loader, built, left_out, wanted, device, amp, amp_dtype, timed, mode, progress)


def _measured(
    model: nn.Module,
    loader: Iterable[Any],
    built: Mapping[tuple[str, float], nn.Module],
    left_out: list[str],
    budgets: Sequence[float],
    device: str | torch.device,
    amp: bool,
    amp_dtype: str,
    timed: int | None,
    mode: str,
    progress: bool,
) -> Compared:
    """timed  how many images speed is measured on, in this `mode`; None: it is not."""
    models = {UNCOMPRESSED: model, **{f"{name} {budget}": each for (name, budget), each in built.items()}}
    meters = {name: ImageCosts(each) for name, each in models.items() if decides_by_image(each)}
    spread = None if timed is None else Spread(timed)

    def after(name: str, images: Tensor) -> None:
        if name in meters:
            meters[name].add(images)
        if name == UNCOMPRESSED and spread is not None:
            spread.add(images)

    evaluations = evaluate_in_turn(models, loader, device, amp, amp_dtype, after, progress=progress)
    costs = {name: meters[name].mean() if name in meters else cost_of(each) for name, each in models.items()}
    speeds: dict[str, Speed] = {}
    if spread is not None:
        try:
            speeds = _speeds(models, costs, spread.images(timed), amp_dtype if amp else "float32", mode)
        except Exception as error:  # whatever it is, what was evaluated is not lost
            reason = (str(error) or type(error).__name__).splitlines()[0]
            left_out = [*left_out, f"speed in mode {mode}: {reason}"]
    rows = _rows(built, budgets, evaluations, costs, meters, speeds)
    whole = evaluations[UNCOMPRESSED], gmacs(model)
    return Compared(*whole, rows, left_out, speeds.get(UNCOMPRESSED), speeds.get(WITH_KERNELS))


def _rows(
    built: Mapping[tuple[str, float], nn.Module],
    budgets: Sequence[float],
    evaluations: Mapping[str, Evaluation],
    costs: Mapping[str, float],
    meters: Mapping[str, ImageCosts],
    speeds: Mapping[str, Speed],
) -> list[Row]:
    rows: list[Row] = []
    for budget in budgets:
        first: Evaluation | None = None
        for (name, at), each in built.items():
            if at != budget:
                continue
            result = evaluations[key := f"{name} {budget}"]
            notes = [off_budget(costs[key], budget)]
            if key in meters:
                notes.append(f"padded to {meters[key].padded():.3g} GMACs in these batches")
            if key in speeds:
                notes += _timing(speeds[key], speeds[UNCOMPRESSED])
            to_whole = compare_evaluations(result, evaluations[UNCOMPRESSED])
            to_first = None if first is None else compare_evaluations(result, first)
            first = first or result
            note = "; ".join(filter(None, notes))
            rows.append(
                Row(
                    name,
                    budget,
                    costs[key],
                    result,
                    to_whole,
                    to_first,
                    settings_of(each),
                    note,
                    speeds.get(key),
                )
            )
    return rows


def _runs_eager(model: nn.Module, mode: str) -> bool:
    """Whether a model has no one graph: its tokens depend on the images or, where it is compiled, on the turn."""
    return decides_by_image(model) or ("compiled" in mode and isinstance(model, LowerResolution))


def _timing(speed: Speed, whole: Speed) -> list[str]:
    """What to know of a row's speed."""
    said = [f"timed {speed.mode}"] if speed.mode != whole.mode else []
    if speed.spread_ms > UNSTEADY * speed.ms:
        said.append(f"times differ by {speed.spread_ms / speed.ms:.0%}")
    return said


def _speeds(
    models: Mapping[str, nn.Module], costs: Mapping[str, float], images: Tensor, dtype: str, mode: str
) -> dict[str, Speed]:
    """Every model on the same images, timed in turns; the batch is halved where there is no memory for it."""
    lent = copy.deepcopy(dict(models))  # together, so that what they share stays shared
    rows = [
        Entrant(name, each.to(DTYPES[dtype]).eval(), costs[name], eager=_runs_eager(each, mode))
        for name, each in lent.items()
    ]
    # What kernels do faster without removing a token, any model could have.
    if images.is_cuda or kernels.INTERPRETED:
        whole = rows[0]
        rows.append(Entrant(WITH_KERNELS, with_kernels(whole.model), whole.gmacs))
    batch = images.to(DTYPES[dtype])
    timed = largest_that_fits(lambda n: time_rows(rows, batch[:n], mode, dtype), len(batch), "what is timed")
    return {speed.name: speed for speed in timed}


def _cost(model: CompressedModel, images: Tensor | None) -> float:
    """GMACs of a model that is given; of one that decides image by image, the mean over these images."""
    if images is None or not decides_by_image(model):
        return gmacs(model)
    meter = ImageCosts(model.to(images.device))
    with torch.inference_mode():
        for part in images.split(AT_ONCE):
            meter.add(part)
    return meter.mean()


T = TypeVar("T", Schedule, CompressedModel)


def _one_by_one(given: Mapping[str, T | Sequence[T]] | None) -> list[tuple[str, T]]:
    found = ((name, each if isinstance(each, Sequence) else [each]) for name, each in (given or {}).items())
    return [(name, one) for name, several in found for one in several]


def _budgets(budgets: str | Sequence[float], whole: float, costs: Sequence[float]) -> list[float]:
    """Budgets in falling order; without any, those of the schedules, of which nearly equal ones count once."""
    if isinstance(budgets, str):
        return parse_gmacs(budgets, whole)
    if budgets:
        return sorted(set(budgets), reverse=True)
    if not costs:
        raise DiffRateError("give at least one budget, such as 0.8G or 60%, or a schedule")
    found: list[float] = []
    for cost in sorted(costs, reverse=True):
        if not found or found[-1] - cost > TOLERANCE * found[-1]:
            found.append(cost)
    return found
