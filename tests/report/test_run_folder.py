"""Reading a run folder: what is there, what is missing, what is broken."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from diffrate.errors import DiffRateError
from diffrate.report.run import read_run
from report.runs import SCHEDULE, SCRIPT, STEPS, plain_run


def test_everything_is_read(tmp_path: Path) -> None:
    run = read_run(plain_run(tmp_path, origin={"checkpoint": "w"}))
    assert run.schedule == SCHEDULE
    assert (run.model, run.whole, run.seconds) == (SCRIPT, {"gmacs": 0.001}, 12.3)
    assert run.steps == STEPS
    assert run.origin == {"checkpoint": "w"}
    assert run.made["torch"] == "9.9"
    assert run.measured == {}


def test_a_schedule_is_enough(tmp_path: Path) -> None:
    SCHEDULE.save(tmp_path / "schedule.json")
    run = read_run(tmp_path)
    assert (run.model, run.whole, run.seconds, run.steps) == (None, {}, None, [])


def test_several_budgets_come_largest_first(tmp_path: Path) -> None:
    for budget in (0.8, 1.0, 0.9):
        replace(SCHEDULE, cost={"gmacs": budget}).save(tmp_path / f"schedule-{budget}G.json")
    assert [schedule.cost["gmacs"] for schedule in read_run(tmp_path).schedules] == [1.0, 0.9, 0.8]


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(DiffRateError, match="is not a folder"):
        read_run(tmp_path / "none")
    with pytest.raises(DiffRateError, match="holds no finished search"):
        read_run(tmp_path)
    plain_run(tmp_path)
    broken = [
        ("config.json", "[]", "holds no object"),
        ("config.json", "{", "cannot read .*config.json"),
        ("measured.json", "\udcff", "cannot read .*measured.json"),
        ("history.json", json.dumps({"steps": {}}), "not the history of a search"),
        ("history.json", json.dumps({"steps": [{**STEPS[0], "loss": "low"}]}), "not the history"),
        (
            "history.json",
            '{"steps": [{"budget": "x", "step": 1, "loss": NaN, "kept": []}]}',
            "not the history",
        ),
        ("history.json", json.dumps({"steps": [{**STEPS[0], "kept": 3}]}), "not the history"),
        ("schedule.json", "{}", "this is no schedule"),
    ]
    for name, text, sentence in broken:
        good = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else None
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(DiffRateError, match=sentence):
            read_run(tmp_path)
        if good is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(good)
    read_run(tmp_path)
