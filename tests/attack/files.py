"""Damaged files: every kind of file that diffrate reads, changed byte by byte and value by value.

A change that happens to leave a good file must leave one that works; every other must be refused in a sentence.
"""

from __future__ import annotations

import copy
import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import diffrate
from attack.outcome import Tally, outcome
from conftest import random_vit
from costs.test_table import a_table
from diffrate.cli.segment import load_segmenter
from diffrate.costs.gemmini.design import Design
from diffrate.costs.table import LatencyTable, TableCost
from diffrate.report.page import write_report
from diffrate.saving import load, save
from diffrate.schedule import Schedule
from diffrate.training import FINETUNE, finetune
from report.runs import SCRIPT, measured_run

SCHEDULE = Schedule((65, 50, 40, 30), (65, 45, 35, 20), cost={"gmacs": 0.5}, made={"by": "a test"})
EXTREME: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 65, 10**6, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.0, 1e-300, 1e300, math.nan,
    math.inf, -math.inf, "", "x" * 5000, SCRIPT, "\x00", "\ud800", "../../etc/passwd", [], [[]], {}, {"a": {}},
    [1, 2, 3], [65] * 1000, ["x"], [None] * 4,
)  # fmt: skip


def value_changed(text: bytes, chance: random.Random) -> bytes:
    """Another value somewhere in a JSON file, or one too few, too many, or out of place."""
    values = json.loads(text)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        places = list(_places(values))
        if not places:
            break
        parent, key = chance.choice(places)
        match chance.randrange(6):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent[chance.choice(("", "x", "format", "__class__"))] = parent.pop(key)
            case 1:
                parent.insert(chance.randrange(len(parent) + 1), copy.deepcopy(parent[key]))
            case 2:
                other, place = chance.choice(places)
                parent[key] = copy.deepcopy(other[place])
            case _:
                parent[key] = copy.deepcopy(chance.choice(EXTREME))
    return json.dumps(values).encode()


def _places(values: Any) -> Any:
    keys = (
        values.keys() if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else ()
    )
    for key in keys:
        yield values, key
        yield from _places(values[key])


def bytes_changed(text: bytes, chance: random.Random) -> bytes:
    """A few bytes flipped, lost, repeated or put in, or the file cut short."""
    data = bytearray(text)
    for _ in range(chance.choice((1, 1, 2, 8))):
        start = chance.randrange(len(data) + 1)
        length = chance.choice((1, 1, 4, 100))
        match chance.randrange(5):
            case 0:
                data[start : start + length] = chance.randbytes(min(length, len(data) - start))
            case 1:
                del data[start : start + length]
            case 2:
                data[start:start] = data[start : start + length]
            case 3:
                data[start:start] = chance.choice(
                    (b"\x00", b"\xff", b"9" * 5000, b"[" * 5000, b'"', b"}", b"-", b"1e999")
                )
            case 4:
                del data[start:]
    return bytes(data)


class Targets:
    """A good file of every kind, and how each is used. Made once: the attacks copy them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.good = folder / "good"
        self.model = random_vit()
        generator = torch.Generator().manual_seed(0)
        self.data = [(torch.randn(3, 32, 32, generator=generator), i % 7) for i in range(16)]
        self._make()
        # name: the file under attack inside a copy of a folder, and what is done with that folder
        self.uses: dict[str, tuple[str, Callable[[Path], object]]] = {
            "schedule": ("files/schedule.json", self._schedule),
            "latency table": ("files/table.json", self._table),
            "accelerator design": ("files/design.json", lambda files: Design.load(files / "design.json")),
            "saved model": ("model/config.json", load),
            "saved weights": ("model/model.safetensors", load),
            "report: schedule": ("run/schedule.json", self._report),
            "report: config": ("run/config.json", self._report),
            "report: history": ("run/history.json", self._report),
            "report: measured": ("run/measured.json", self._report),
            "segmentation settings": ("segmenter/segmenter.json", load_segmenter),
            "search: config": ("search/config.json", self._resume_search),
            "search: state": ("search/state.json", self._resume_search),
            "tuning: config": ("tuning/config.json", self._resume_tuning),
            "tuning: state": ("tuning/state.safetensors", self._resume_tuning),
        }

    def _make(self) -> None:
        files = self.good / "files"
        files.mkdir(parents=True)
        SCHEDULE.save(files / "schedule.json")
        replace(a_table(depth=4, dim=32, kind_of=[0] * 4), model=None).save(files / "table.json")
        (files / "design.json").write_text(json.dumps({"design": Design().__dict__, "cost": {"ms": 1.0}}))
        save(diffrate.compress(self.model, SCHEDULE), self.good / "model")
        measured_run(self.good / "run")
        self._search(self.good / "search", steps=4)
        state = json.loads((self.good / "search" / "state.json").read_text())
        assert state["history"], "an interrupted search has a history"
        self._tune(self.good / "tuning", epochs=2, max_minutes=1e-9)
        segmenter = self.good / "segmenter"
        segmenter.mkdir()
        settings = {"model": "vit_tiny_patch16_224", "classes": ["a", "b"], "img_size": [32, 32], "width": 8}
        (segmenter / "segmenter.json").write_text(json.dumps({"results": settings}))
        save_file({"x": torch.zeros(1)}, segmenter / "weights.safetensors")

    def _search(self, folder: Path, steps: int, resume: bool = False) -> None:
        diffrate.search(
            self.model, self.data, "60%", steps=steps, batch_size=4, held_out=0.25, progress=False, output=folder,
            resume=resume,
        )  # fmt: skip

    def _tune(self, folder: Path, epochs: int, resume: bool = False, **options: Any) -> None:
        recipe = replace(FINETUNE, epochs=epochs, batch_size=8, precision="no")
        finetune(
            self.model,
            SCHEDULE,
            self.data,
            self.data,
            folder,
            recipe,
            progress=False,
            resume=resume,
            **options,
        )

    def _schedule(self, files: Path) -> None:
        schedule = Schedule.load(files / "schedule.json")
        schedule.save(files / "again.json")
        assert Schedule.load(files / "again.json") == schedule
        schedule.resized(50)
        fast = diffrate.compress(self.model, schedule)
        with torch.inference_mode():
            assert fast(torch.zeros(1, 3, 32, 32)).isfinite().all()

    def _table(self, files: Path) -> None:
        table = LatencyTable.load(files / "table.json")
        layout = diffrate.backbones.backbone_of(self.model).layout
        table.check(layout, "my_vit", table.device)
        kept = torch.tensor([60.0, 40.0, 20.0, 10.0], dtype=torch.float64, requires_grad=True)
        price = TableCost(table).price(kept)["latency_ms"]
        price.backward()
        assert price.isfinite()
        table.save(files / "again.json")

    def _report(self, run: Path) -> None:
        write_report(run, None, "a test")

    def _resume_search(self, folder: Path) -> None:
        self._search(folder, steps=4, resume=True)

    def _resume_tuning(self, folder: Path) -> None:
        self._tune(folder, epochs=2, resume=True)

    def attack(self, kind: str, count: int, seed: int = 0) -> Tally:
        """`count` damaged files of one kind."""
        chance, tally = random.Random(f"{kind} {seed}"), Tally()
        where, use = self.uses[kind]
        name, file = where.split("/")
        good = (self.good / where).read_bytes()
        for number in range(count):
            work = self.folder / "work"
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(self.good / name, work)
            change = value_changed if file.endswith(".json") and chance.random() < 0.75 else bytes_changed
            (work / file).write_bytes(change(good, chance))
            state = torch.get_rng_state()
            ended, said = outcome(lambda work=work: use(work))
            torch.set_rng_state(state)
            left = [path.name for path in work.iterdir() if path.name.startswith(".")]
            tally.add("left behind" if left else ended, f"{kind} {seed}/{number}: {said or left}")
        return tally
