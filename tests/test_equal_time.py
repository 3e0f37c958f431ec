"""reproduce/equal_time.py: what is searched for a time, moved to it, timed and compared."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import diffrate
from diffrate import Operator
from diffrate.costs import LatencyTable, TableCost
from diffrate.costs.table import BlockTimes, Fit, Series
from diffrate.devices import device_name


def a_table(operator: Operator) -> LatencyTable:
    """1 ms for all tokens in attention, 2 in the MLP, and a tenth for removing any."""

    def straight(ms: float, start: float = 0.0) -> Series:
        return Series([1, 197], [start + ms / 197, start + ms], [0.0, 0.0])

    times = BlockTimes(straight(1.0), straight(2.0), straight(0.0, 0.1), whole=1.0)
    checks = [{"predicted_ms": 11.0, "measured_ms": 10.0}, {"predicted_ms": 9.8, "measured_ms": 10.0}]
    return LatencyTable(
        None, 12, 8, 197, 1, device_name(torch.device("cpu")), "float32", 2, "eager", "2.8", asdict(operator),
        [times], [0] * 12,
        straight(1.0, 0.1), 0.5, Fit(), checks,
    )  # fmt: skip


def test_schedules_for_a_time_are_searched_moved_timed_and_paired(
    load, small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, whole = load("equal_time"), diffrate.gmacs(small.model)
    given = diffrate.methods.schedules.random_schedule(small.model, 0.6 * whole)
    asked: list[tuple[str, Operator | None]] = []

    def search(_: object, __: object, budget: str, **settings: Any) -> SimpleNamespace:
        (cost,) = settings["costs"]
        asked.append((budget, settings["operator"]))
        assert cost.table.operator["choice"] == ("cost" if asked[-1][1] is None else "rank")
        return SimpleNamespace(schedule=given, seconds=1.0)

    monkeypatch.setattr(module.diffrate, "search", search)
    monkeypatch.setattr(module, "profile", lambda *_, operator, **__: a_table(operator))
    targets = {"kept": [list(given.effective.merge)], "speeds": [1.5], "ms": [30.0, 20.0]}
    (tmp_path / "targets.json").write_text(json.dumps(targets))
    arguments = (small, [given], [1.5], 2, tmp_path)
    module.run(*arguments, until="tables")
    assert asked == []
    monkeypatch.setattr(module, "profile", lambda *_, **__: pytest.fail("profiled again"))
    module.run(*arguments, until="searches", only=["rank"])
    assert asked == [("30.0ms", module.OPERATORS["rank"]), ("20.0ms", module.OPERATORS["rank"])]
    assert "equal_time" not in small.tables
    module.run(*arguments)
    assert asked[2:] == [("30.0ms", None), ("20.0ms", None)]  # nothing is searched for again
    rows = small.tables["equal_time"]["rows"]
    tables = [f"table, {name}" for name in module.OPERATORS]
    in_ms, by_rank, _, theirs = module.ROWS
    names = ["uncompressed", *tables, *module.ROWS, in_ms, by_rank, theirs]
    assert [row["name"] for row in rows] == names
    assert [row["off_by_percent"] for row in rows[1:4]] == [pytest.approx(6.0)] * 3
    assert [row["target_ms"] for row in rows[4:]] == [30.0] * 4 + [20.0] * 3
    for row in rows[4:]:
        assert row["speed"] == pytest.approx(rows[0]["ms"] / row["ms"])
        assert ("to_search" in row) == (row["name"] != in_ms)
    for row in (rows[7], rows[10]):
        moved = diffrate.Schedule.from_dict(row["settings"]["schedule"])
        assert moved.operator == Operator()
        assert 0.98 * row["target_ms"] < takes(moved) <= row["target_ms"]
    with pytest.raises(diffrate.DiffRateError, match="another batch size: 2, not 3"):
        module.run(small, [given], [1.5], 3, tmp_path)
    with pytest.raises(diffrate.DiffRateError, match="do not reach 3 ms"):
        module.as_fast(small.model, a_table(Operator()), 3.0)


def takes(schedule: diffrate.Schedule) -> float:
    return float(TableCost(a_table(Operator())).price_of(schedule)["latency_ms"])


def test_targets_that_were_measured_for_other_schedules_are_refused(load, tmp_path: Path) -> None:
    module, file = load("equal_time"), tmp_path / "targets.json"
    schedules = [diffrate.Schedule(kept, kept) for kept in ([9, 8], [9, 7])]
    timed = SimpleNamespace(ms=lambda given: [12.0, 11.0, *[5.00004] * len(given)])
    assert module.targets_of(timed, schedules[:1], [2.0], file) == [5.0, 6.0]
    assert module.targets_of(None, schedules[:1], [2.0], file) == [5.0, 6.0]
    for given, speeds in ((schedules[1:], [2.0]), (schedules[:1], [3.0]), (schedules, [])):
        with pytest.raises(diffrate.DiffRateError, match="other schedules or speeds"):
            module.targets_of(None, given, speeds, file)
