"""A run folder, read: the schedules that a search found, its course, its settings, and what was measured since."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffrate.errors import DiffRateError
from diffrate.schedule import Schedule

MEASURED = "measured.json"


@dataclass(frozen=True)
class Run:
    """What a folder holds. Only the schedules are always there: all else may be missing, and the report says so.

    schedules  of the largest budget first; the last, tightest one is the result.
    steps      entries of the search's history: budget, step, loss, costs, kept, and held_out where it was checked.
    config     what the search was asked to do; made  the command, versions and machine that did it.
    measured   what `measure` found on images: results with their origin.
    """

    folder: Path
    schedules: list[Schedule]
    steps: list[dict[str, Any]] = field(default_factory=list)
    seconds: float | None = None
    unreadable: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def schedule(self) -> Schedule:
        return self.schedules[-1]

    @property
    def model(self) -> str | None:
        """The model's name, where the folder has it."""
        name = self.config.get("model") or self.schedule.model
        return None if name is None else str(name)

    @property
    def origin(self) -> dict[str, Any]:
        """Where the search had weights and images from."""
        origin = self.config.get("origin")
        return origin if isinstance(origin, dict) else {}

    @property
    def whole(self) -> dict[str, float]:
        """What the uncompressed model costs by each metric, where the folder has it."""
        whole = self.config.get("whole")
        costs = whole if isinstance(whole, dict) else {}
        return {metric: float(cost) for metric, cost in costs.items() if _number(cost) and cost > 0}


def read_run(folder: Path) -> Run:
    """The run in a folder; DiffRateError where it holds no schedule, or a file that is not what its name says."""
    if not folder.is_dir():
        raise DiffRateError(f"{folder} is not a folder")
    files = sorted(file for file in folder.glob("schedule*.json") if file.is_file())
    if not files:
        raise DiffRateError(f"{folder} holds no finished search: there is no schedule in it")
    found = [Schedule.load(file) for file in files]
    config, history, measured = (_read(folder / name) for name in ("config.json", "history.json", MEASURED))
    seconds, unreadable, made = (history.get(name) for name in ("seconds", "unreadable", "made"))
    return Run(
        folder,
        sorted(found, key=lambda schedule: -schedule.cost.get("gmacs", 0.0)),
        _steps(history.get("steps", []), folder / "history.json"),
        float(seconds) if isinstance(seconds, int | float) else None,
        [str(name) for name in unreadable] if isinstance(unreadable, list) else [],
        config,
        made if isinstance(made, dict) else {},
        measured,
    )


def _steps(steps: Any, path: Path) -> list[dict[str, Any]]:
    """The entries of a history, each with the numbers that the plots need."""
    if not isinstance(steps, list):
        raise DiffRateError(f"{path} is not the history of a search")
    for entry in steps:
        good = isinstance(entry, dict) and isinstance(entry.get("budget"), str)
        good = good and all(_number(entry.get(name)) for name in ("step", "loss"))
        good = good and isinstance(entry.get("kept"), list) and all(map(_number, entry["kept"]))
        if not good or not _number(entry.get("held_out", 0.0)):
            raise DiffRateError(f"{path} is not the history of a search")
    return steps


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _read(path: Path) -> dict[str, Any]:
    """An object in a JSON file; empty where there is no such file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DiffRateError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise DiffRateError(f"{path} holds no object")
    return values
