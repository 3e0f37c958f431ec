"""`diffrate.cosearch`: compression rates and a Gemmini design for them, in turns (paper, appendix B.2).

With images the rates are learned by `diffrate.search` on the design of each round; without, a given schedule is moved
onto the budget. The period of `power_at_rate_mw` is one for all designs, that of the uncompressed model on Gemmini's
default design, unless told otherwise: if it shrank with the design, a faster one would be blamed for its speed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from torch.utils.data import Dataset

from diffrate.backbones import backbone_of
from diffrate.compressed import CompressedModel, checked
from diffrate.costs.base import Costs
from diffrate.costs.gemmini import Design, GemminiCost, Workload
from diffrate.costs.macs import MacCost
from diffrate.errors import DiffRateError
from diffrate.results import write_json
from diffrate.schedule import Schedule
from diffrate.searching.budget import LAMBDAS, Budget, Space, check_budget, parse_budgets, project, rounded
from diffrate.searching.hardware import HardwareSearch
from diffrate.searching.run import search

HARDWARE_STEPS = 200
ROUND = "round-"  # and its number, from 1: the folder of its search


@dataclass
class CosearchResult:
    """A schedule, the design it is for, what both cost, and how the rounds went."""

    schedule: Schedule
    design: Design
    cost: dict[str, float]
    rounds: list[dict[str, Any]]


def cosearch(
    model: nn.Module,
    data: Dataset[Any] | tuple[Dataset[Any], Dataset[Any]] | None,
    budget: str,
    *,
    schedule: Schedule | None = None,
    workload: Workload | None = None,
    rounds: int = 3,
    hardware_steps: int = HARDWARE_STEPS,
    estimator: str = "priced",
    slopes: str = "table",
    largest_array: int | None = None,
    lambdas: Mapping[str, float] | None = None,
    seed: int = 0,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    say: Callable[[str], None] = lambda _: None,
    **search_options: Any,
) -> CosearchResult:
    """Learn a schedule and a Gemmini design that together meet a budget such as "2.9G,37ms,90mW".

    data       images to learn the rates on, as for diffrate.search; None: `schedule` is only moved onto the budget.
    schedule   where the rates start.
    workload   the model's matrix products, with clock, energies and period; by default those of Gemmini at 354 MHz.
    estimator, slopes   how costs are differentiated, in hardware ("priced" or "paper") and counts ("table" or "paper").
    largest_array       the largest side of the array that may be built; area has no price otherwise.
    output     folder for design, schedule, history and plot, and one for the search of each round. With `resume` an
               interrupted co-search there goes on: designs are learned again, which takes seconds and ends the same,
               and each round's search is resumed.
    search_options      for diffrate.search.
    """
    if rounds < 1 or hardware_steps < 1:
        raise DiffRateError("a co-search needs at least one round and one hardware step")
    model = model.original if isinstance(model, CompressedModel) else model
    backbone = backbone_of(model)
    if data is None and schedule is None:
        raise DiffRateError("without images there must be a schedule to start from")
    start = None if schedule is None else checked(schedule, backbone.layout)
    workload = workload or Workload.of_backbone(backbone)
    if workload.period_ms is None:
        whole = workload.price(Design().row()[None], [float(workload.tokens)] * workload.depth)
        workload = replace(workload, period_ms=float(whole["latency_ms"]))
    macs = MacCost.of_backbone(backbone)

    def space_on(design: Design) -> Space:
        return Space.of(backbone, Costs([macs, GemminiCost(workload, design, slopes)]))

    space = space_on(Design())
    budgets = parse_budgets(budget, space.cost.price_of(None))
    if len(budgets) > 1:
        raise DiffRateError("a co-search takes one budget: one value for each metric")
    target = budgets[0]
    hardware = HardwareSearch(
        workload, target, estimator, {**LAMBDAS, **(lambdas or {})}, seed, largest_array
    )
    hardware.check([float(n) for n in space.every_block([int(n) for n in space.least])])
    if "gmacs" in target.targets:
        check_budget(target.targets["gmacs"], space)
    folder = None if output is None else _folder(output, resume)

    # The first design is for the rates given, or for the whole model, moved onto the MACs where those have a target.
    now = space.most if start is None else space.searched(start)
    gmacs = target.targets.get("gmacs")
    if gmacs is not None and space.over(now, gmacs):
        now = project(now, gmacs, space, space.freely())
    found = start
    course: list[dict[str, Any]] = []
    for turn in range(rounds):
        kept = [float(n) for n in space.every_block([int(n) for n in now])]
        steps = hardware.run(kept, hardware_steps)
        design = hardware.design
        own = space_on(design)
        within = _possible(target, own)
        say(f"round {turn + 1}: {design}")
        every_token = torch.full_like(own.most, own.tokens)
        if data is None:
            assert start is not None
            found = _moved(start, within, own)
        elif not own.over(every_token, within):
            say("         the hardware alone meets the budget: a target in MACs would compress the model too")
            found = Schedule.identity(own.depth, own.tokens, own.prefix)
        else:
            own_folder = None if folder is None else folder / f"{ROUND}{turn + 1}"
            result = search(
                model, data, within, costs=[GemminiCost(workload, design, slopes)], start=found, seed=seed,
                lambdas=lambdas, output=own_folder,
                resume=resume and own_folder is not None and (own_folder / "config.json").exists(), **search_options,
            )  # fmt: skip
            found = result.schedule
        now = own.searched(found)
        cost = own.cost.price_of(found)
        say("         " + ", ".join(f"{metric} {value:.4g}" for metric, value in cost.items()))
        course.append({"design": asdict(design), "cost": cost, "kept": list(found.merge), "hardware": steps})
    assert found is not None
    for metric, wanted in target.targets.items():
        if cost[metric] > wanted * 1.0001:
            say(f"{metric} ended at {cost[metric]:.4g}, above its target of {wanted:.4g}")
    found = replace(found, cost=cost, made={**found.made, "budget": str(target), "design": asdict(design)})
    both = CosearchResult(found, design, cost, course)
    if folder is not None and PartialState().is_main_process:
        _write(folder, both, target, workload)
    return both


def _possible(target: Budget, space: Space) -> Budget:
    """The budget, with a target that this design cannot reach even at the fewest tokens moved to what it can."""
    least = space.price(space.least)
    return Budget({m: max(t, 1.02 * float(least[m])) for m, t in target.targets.items()})


def _moved(start: Schedule, budget: Budget, space: Space) -> Schedule:
    """A schedule moved onto a budget that it exceeds, keeping its shape."""
    counts = torch.minimum(torch.maximum(space.searched(start), space.least), space.most)
    if space.over(counts, budget):
        counts = project(counts, budget, space, space.freely())
    merge = space.every_block(rounded(counts, budget, space))
    given = start.effective
    before = [space.tokens, *merge[:-1]]
    joined = [
        p - m for p, m in zip(given.prune, given.merge, strict=True)
    ]  # as many as before are merged, not pruned
    prune = tuple(min(b, m + j) for b, m, j in zip(before, merge, joined, strict=True))
    return Schedule(prune, merge, space.prefix, start.operator, start.model, start.img_size, made=start.made)


def _folder(output: str | os.PathLike[str], resume: bool) -> Path:
    folder = Path(output)
    known = (folder / "design.json").exists() or any(folder.glob(f"{ROUND}*/config.json"))
    if known and not resume:
        raise DiffRateError(
            f"{folder} already holds a co-search: resume it (--resume), or choose another folder"
        )
    if resume and not known:
        raise DiffRateError(f"{folder} holds no co-search to resume")
    return folder


def _write(folder: Path, result: CosearchResult, target: Budget, workload: Workload) -> None:
    from diffrate.plots import design_plot

    write_json(
        folder / "design.json",
        {
            "design": asdict(result.design),
            "cost": result.cost,
            "targets": dict(target.targets),
            "array": f"{result.design.rows}x{result.design.rows}",
            "memory_kb": result.design.scratchpad_kb + result.design.accumulator_kb,
            "clock_mhz": workload.clock_mhz,
            "period_ms": workload.period_ms,
            "energies": asdict(workload.energies),
        },
    )
    write_json(folder / "history.json", {"rounds": result.rounds})
    result.schedule.save(folder / "schedule.json")
    design_plot(workload, result.schedule, result.design, target, folder / "designs.png")
