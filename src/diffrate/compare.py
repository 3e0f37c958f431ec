"""Several methods at several budgets on the same images: equal MACs, paired differences, and how sure they are.

Every model runs on every batch, in turns. Each row is compared with the uncompressed model and with the first method
of its budget, image by image.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffrate.compressed import CompressedModel, compress
from diffrate.costs.macs import gmacs
from diffrate.errors import DiffRateError
from diffrate.evaluate import Comparison, Evaluation, compare_evaluations, evaluate_in_turn
from diffrate.methods import METHODS, build, cost_of, settings_of
from diffrate.methods.policy import PolicyModel
from diffrate.schedule import Schedule
from diffrate.searching.budget import parse_budgets

TOLERANCE = 0.01  # of the budget, within which MACs count as equal
MEASURED_ON = 256  # images on which a method that decides image by image finds its setting
NUMBERS = ("top1", "top5", "loss", "images", "images_per_second")


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

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "budget": self.budget,
            "gmacs": self.gmacs,
            **{name: getattr(self.evaluation, name) for name in NUMBERS},
            "to_uncompressed": asdict(self.to_whole),
            "to_first": None if self.to_first is None else asdict(self.to_first),
            "note": self.note,
            "settings": dict(self.settings),
        }


@dataclass(frozen=True)
class Compared:
    """The uncompressed model, the rows in order of falling budget, and what could not be built."""

    whole: Evaluation
    gmacs: float
    rows: list[Row]
    left_out: list[str]

    def to_dict(self) -> dict[str, Any]:
        whole = {name: getattr(self.whole, name) for name in NUMBERS}
        return {
            "uncompressed": {"gmacs": self.gmacs, **whole},
            "rows": [row.to_dict() for row in self.rows],
            "left_out": self.left_out,
        }


def compare(
    model: nn.Module,
    loader: Iterable[Any],
    methods: Sequence[str] = (),
    budgets: str | Sequence[float] = (),
    schedules: Mapping[str, Schedule] | None = None,
    *,
    trained: Mapping[str, CompressedModel] | None = None,
    search_data: Any = None,
    device: str | torch.device = "cpu",
    amp: bool = False,
    amp_dtype: str = "float16",
    seed: int = 0,
    progress: bool = True,
) -> Compared:
    """Evaluate methods at budgets, and schedules and trained models at their own cost, beside the uncompressed model.

    loader     batches of images and labels; it is read more than once where methods measure their own cost.
    methods    names from `diffrate methods`; each row is compared with the first one.
    budgets    GMACs, or text such as "0.8G,60%"; without any, the costs of the schedules.
    schedules  further rows: a name and a schedule each. They come before the methods of the budget that they meet.
    trained    the same with models that have weights of their own, such as methods.trained.read_trained returns.
    """
    whole = gmacs(model)
    given = {name: compress(model, schedule) for name, schedule in (schedules or {}).items()}
    given |= trained or {}
    wanted = _budgets(budgets, whole, [gmacs(each) for each in given.values()])
    for name in methods:
        if name not in METHODS:
            raise DiffRateError(f"there is no method {name!r}: `diffrate methods` lists {', '.join(METHODS)}")
    together = len(schedules or {}) + len(trained or {})
    if len(set(methods)) < len(methods) or set(methods) & set(given) or len(given) < together:
        raise DiffRateError("give each method and schedule once")
    model.to(torch.device(device))
    images = _first_images(loader, torch.device(device)) if "ats" in methods else None
    built: dict[tuple[str, float], nn.Module] = {}
    left_out: list[str] = []
    for name, each in given.items():
        cost = gmacs(each)
        nearest = min(wanted, key=lambda budget: abs(budget - cost))
        if abs(cost - nearest) > TOLERANCE * nearest:
            raise DiffRateError(f"{name} costs {cost:.4g} GMACs, which is none of the budgets")
        built[name, nearest] = each
    for budget in wanted:
        for name in methods:
            try:
                built[name, budget] = build(name, model, budget, images, search_data, seed)
            except DiffRateError as error:
                left_out.append(f"{name} at {budget:.4g} GMACs: {error}")
    if not built:
        raise DiffRateError(
            "there is nothing to compare: " + ("; ".join(left_out) or "give methods or schedules")
        )
    return _evaluated(model, loader, built, left_out, wanted, device, amp, amp_dtype, progress)


def _evaluated(
    model: nn.Module,
    loader: Iterable[Any],
    built: Mapping[tuple[str, float], nn.Module],
    left_out: list[str],
    budgets: Sequence[float],
    device: str | torch.device,
    amp: bool,
    amp_dtype: str,
    progress: bool,
) -> Compared:
    models = {"": model, **{f"{name} {budget}": each for (name, budget), each in built.items()}}
    meters = {name: ImageCosts(each) for name, each in models.items() if _decides_by_image(each)}

    def after(name: str, images: Tensor) -> None:
        if name in meters:
            meters[name].add(images)

    evaluations = evaluate_in_turn(models, loader, device, amp, amp_dtype, after, progress=progress)
    rows: list[Row] = []
    for budget in budgets:
        first: Evaluation | None = None
        for (name, at), each in built.items():
            if at != budget:
                continue
            result = evaluations[key := f"{name} {budget}"]
            cost = meters[key].mean() if key in meters else cost_of(each)
            note = f"padded to {meters[key].padded():.3g} GMACs in these batches" if key in meters else ""
            if abs(cost - budget) > TOLERANCE * budget:
                note = f"{100 * (cost / budget - 1):+.1f} % off the budget" + (f"; {note}" if note else "")
            to_whole = compare_evaluations(result, evaluations[""])
            to_first = None if first is None else compare_evaluations(result, first)
            first = first or result
            rows.append(Row(name, budget, cost, result, to_whole, to_first, settings_of(each), note))
    return Compared(evaluations[""], gmacs(model), rows, left_out)


def _budgets(budgets: str | Sequence[float], whole: float, costs: Sequence[float]) -> list[float]:
    """Budgets in falling order; without any, those of the schedules, of which nearly equal ones count once."""
    if isinstance(budgets, str):
        return [budget.leading for budget in parse_budgets(budgets, {"gmacs": whole})]
    if budgets:
        return sorted(set(budgets), reverse=True)
    if not costs:
        raise DiffRateError("give at least one budget, such as 0.8G or 60%, or a schedule")
    found: list[float] = []
    for cost in sorted(costs, reverse=True):
        if not found or found[-1] - cost > TOLERANCE * found[-1]:
            found.append(cost)
    return found


def _first_images(loader: Iterable[Any], device: torch.device) -> Tensor:
    """The first images, without their labels."""
    parts: list[Tensor] = []
    for images, _ in loader:
        parts.append(images.to(device))
        if sum(map(len, parts)) >= MEASURED_ON:
            break
    if not parts:
        raise DiffRateError("there are no images to evaluate")
    return torch.cat(parts)[:MEASURED_ON]


def _decides_by_image(model: nn.Module) -> bool:
    return isinstance(model, PolicyModel) and model.policy.by_image


class ImageCosts:
    """What the images cost under a method that decides image by image: alone, and padded to their batch's longest."""

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, PolicyModel)
        self.model = model
        self.alone: list[Tensor] = []
        self.in_batch: list[Tensor] = []

    def add(self, images: Tensor) -> None:
        counts = self.model.image_counts(images)
        self.alone.append(self.model.gmacs_of_counts(counts))
        longest = counts.amax(dim=0, keepdim=True).expand_as(counts)
        self.in_batch.append(self.model.gmacs_of_counts(longest))

    def mean(self) -> float:
        return float(torch.cat(self.alone).mean())

    def padded(self) -> float:
        return float(torch.cat(self.in_batch).mean())


COLUMNS = (
    "budget",
    "method",
    "GMACs",
    "top-1 %",
    "points to whole",
    "loss rise",
    "points to first",
    "p",
    "images/s",
)


def table(compared: Compared, speed: bool = False) -> tuple[list[str], list[list[str]]]:
    """Columns and cells for people: differences with their 95 % intervals, and McNemar's p against the first row."""
    whole = compared.whole
    rate = [f"{whole.images_per_second:.1f}"] if speed else []
    cells = [["", "uncompressed", f"{compared.gmacs:.3f}", f"{whole.top1:.2f}", "", "", "", "", *rate]]
    for row in compared.rows:
        first = row.to_first
        cells.append(
            [
                f"{row.budget:.3g}",
                row.method + (f" ({row.note})" if row.note else ""),
                f"{row.gmacs:.3f}",
                f"{row.evaluation.top1:.2f}",
                _interval(row.to_whole.top1_difference, row.to_whole.top1_interval, 2),
                _interval(row.to_whole.loss_difference, row.to_whole.loss_interval, 3),
                "" if first is None else _interval(first.top1_difference, first.top1_interval, 2),
                "" if first is None else f"{first.mcnemar_p:.2g}",
                *([f"{row.evaluation.images_per_second:.1f}"] if speed else []),
            ]
        )
    return list(COLUMNS if speed else COLUMNS[:-1]), cells


def markdown(compared: Compared, speed: bool = False) -> str:
    columns, cells = table(compared, speed)
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def as_csv(compared: Compared) -> str:
    """One line a row with plain numbers, for spreadsheets."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    differences = ("top1_difference", "top1_interval", "loss_difference", "loss_interval", "mcnemar_p")
    sides = ("to_uncompressed", "to_first")
    names = [
        f"{side}_{name}{end}"
        for side, name in itertools.product(sides, differences)
        for end in (("_low", "_high") if name.endswith("interval") else ("",))
    ]
    writer.writerow(["method", "budget", "gmacs", *NUMBERS, *names, "note"])
    blank: list[Any] = [""] * len(names)
    whole = compared.to_dict()["uncompressed"]
    writer.writerow(["uncompressed", "", compared.gmacs, *(whole[name] for name in NUMBERS), *blank, ""])
    for row in compared.rows:
        values = row.to_dict()
        cells: list[Any] = []
        for side, name in itertools.product(sides, differences):
            value = "" if values[side] is None else values[side][name]
            cells += (list(value) or ["", ""]) if name.endswith("interval") else [value]
        numbers = [values[name] for name in ("method", "budget", "gmacs", *NUMBERS)]
        writer.writerow([*numbers, *cells, row.note])
    return text.getvalue()


def _interval(value: float, ends: tuple[float, float], digits: int) -> str:
    return f"{value:+.{digits}f} [{ends[0]:+.{digits}f}, {ends[1]:+.{digits}f}]"
