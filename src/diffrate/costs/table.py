"""A measured latency table: what attention, MLP and the removal of tokens take on one machine, and its cost model.

A table belongs to one model, device, batch size, number type, mode and operator. Times are smoothed by isotonic
regression: as measured they are not monotone, and a search would chase the noise. `diffrate.profiling` makes tables.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diffrate.backbones import Layout
from diffrate.costs.base import CostModel, attention_counts, mean_slopes, read
from diffrate.errors import DiffRateError, shown
from diffrate.isotonic import rising
from diffrate.operator import Operator
from diffrate.schedule import MOST_TOKENS, check_is_file, write_text

FORMAT = "diffrate.latency_table"
VERSION = 2
LONGEST_MS = 1e9  # that anything is believed to take
WINDOW = 8  # tokens over which slopes are averaged


@dataclass(frozen=True)
class Series:
    """Milliseconds at some token counts, as measured: medians, and the spread of the middle half."""

    n: list[int]
    ms: list[float]
    spread: list[float]

    def every_count(self, tokens: int) -> Tensor:
        """(tokens + 1,) never falling ms for 0 … tokens tokens: smoothed, and straight between what was measured."""
        smooth = rising(torch.tensor(self.ms, dtype=torch.float64))
        known = torch.tensor(self.n, dtype=torch.float64)
        at = torch.arange(tokens + 1, dtype=torch.float64).clamp(known[0], known[-1])
        above = torch.searchsorted(known, at).clamp(1, len(known) - 1)
        share = (at - known[above - 1]) / (known[above] - known[above - 1])
        return smooth[above - 1] + share * (smooth[above] - smooth[above - 1])


@dataclass(frozen=True)
class BlockTimes:
    """One kind of block: its attention, with token sizes in force; its MLP; and what removing tokens adds.

    whole   ms of attention on all tokens, before any have sizes.
    """

    attention: Series
    mlp: Series
    remove: Series
    whole: float


@dataclass(frozen=True)
class Fit:
    """How a sum of parts becomes the time of a whole model: scales of blocks and of removals, and an offset in ms."""

    blocks: float = 1.0
    removals: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True)
class LatencyTable:
    """What was measured, where, and how well its sums predict whole models (`checks`).

    mode  "eager", or "graph" where all was recorded as CUDA graphs.
    last  the whole last block where it removes tokens and the head looks at the prefix alone: it then runs for those
          tokens only, however many are kept. None for other heads.
    """

    model: str | None
    depth: int
    dim: int
    tokens: int
    prefix: int
    device: str
    dtype: str
    batch_size: int
    mode: str
    torch: str
    operator: dict[str, Any]
    kinds: list[BlockTimes]
    kind_of: list[int]
    last: Series | None
    around: float  # ms of embedding and head
    fit: Fit
    checks: list[dict[str, Any]]

    def check(
        self,
        layout: Layout,
        model: str | None,
        device: str,
        batch_size: int | None = None,
        dtype: str | None = None,
        mode: str | None = None,
        operator: Operator | None = None,
    ) -> None:
        """Refuse to be used for another model, device, batch size, number type, mode or operator."""
        mine = (self.depth, self.dim, self.tokens, self.prefix)
        shapes = ("blocks", "wide", "tokens", "prefix tokens")
        theirs = (layout.depth, layout.dim, layout.tokens, layout.prefix)
        named = self.model is not None and model is not None
        if named and str(self.model).split(".")[0] != str(model).split(".")[0]:
            _refuse("model", shown(self.model), shown(model))
        if mine != theirs:
            words = [
                ", ".join(f"{shown(v)} {w}" for v, w in zip(s, shapes, strict=True)) for s in (mine, theirs)
            ]
            _refuse("model", *words)
        if self.device != device:
            _refuse("device", shown(self.device), shown(device))
        if batch_size is not None and self.batch_size != batch_size:
            _refuse("batch size", shown(self.batch_size), shown(batch_size))
        if dtype is not None and self.dtype != dtype:
            _refuse("number type", shown(self.dtype), shown(dtype))
        if mode is not None and self.mode != mode:
            _refuse("mode", shown(self.mode), shown(mode))
        if operator is not None:
            # A floor takes no time, and held-out images of a search may add one.
            known, asked = (
                each.changed(floor=0.0).in_words() for each in (Operator.from_dict(self.operator), operator)
            )
            if known != asked:
                _refuse("operator", known, asked)

    def save(self, path: str | os.PathLike[str]) -> None:
        values = {"format": FORMAT, "version": VERSION, **asdict(self)}
        write_text(Path(path), json.dumps(values, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LatencyTable:
        check_is_file(Path(path))
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_no_constant)
        except OSError as error:
            raise DiffRateError(f"cannot read the latency table {path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise DiffRateError(f"{path} is not a JSON latency table: {error}") from error
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise DiffRateError(f"{path} is no latency table; `diffrate profile` makes one")
        if values.pop("version", None) != VERSION:
            raise DiffRateError(f"{path} is a latency table of another version than {VERSION}; profile again")
        try:
            kinds = [
                BlockTimes(**{name: _series(part) for name, part in kind.items()})
                for kind in values.pop("kinds")
            ]
            last = _series(values.pop("last"))
            table = cls(kinds=kinds, last=last, fit=Fit(**values.pop("fit")), **values)
            _check_values(table)
            TableCost(table).price_of(None)
        except (TypeError, KeyError, AttributeError, ValueError, IndexError, RuntimeError) as error:
            raise DiffRateError(f"{path} is not a whole latency table: {error}") from error
        return table


def _refuse(what: str, mine: str, theirs: str) -> None:
    raise DiffRateError(
        f"the latency table was measured for another {what}: {mine}, not {theirs}; "
        "profile again, or say that it may be used anyway (--any-table)"
    )


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _check_values(table: LatencyTable) -> None:
    """ValueError for a table that no profile could have measured; a table from elsewhere may hold anything."""
    for name in ("depth", "dim", "tokens", "batch_size"):
        _check_counts(name, [getattr(table, name)], 1, MOST_TOKENS)
    _check_counts("prefix", [table.prefix], 0, table.tokens)
    for name in ("device", "dtype", "mode", "torch"):
        if not isinstance(getattr(table, name), str):
            raise ValueError(f"{name} must be text")
    if not isinstance(table.model, str | None):
        raise ValueError("model must be text")
    _check_counts("kind_of", table.kind_of, 0, len(table.kinds) - 1)
    if len(table.kind_of) != table.depth:
        raise ValueError(f"kind_of must have one entry for each of the {table.depth} blocks")
    for kind in table.kinds:
        for series in (kind.attention, kind.mlp, kind.remove):
            _check_series(series)
        _check_numbers("whole", [kind.whole])
    if table.last is not None:
        _check_series(table.last)
    _check_numbers("around", [table.around])
    _check_numbers("fit", [table.fit.blocks, table.fit.removals, table.fit.offset])


def _check_series(series: Series) -> None:
    _check_counts("n", series.n, 0, MOST_TOKENS)
    _check_numbers("ms", series.ms)
    _check_numbers("spread", series.spread)
    rises = all(a < b for a, b in itertools.pairwise(series.n))
    if len(series.n) < 2 or not rises or not len(series.n) == len(series.ms) == len(series.spread):
        raise ValueError("a series has at least two rising token counts, each with its ms and spread")


def _check_counts(name: str, values: list[int], least: int, most: int) -> None:
    if not all(type(value) is int and least <= value <= most for value in values):
        raise ValueError(f"{name} must be whole numbers from {least} to {most}")


def _check_numbers(name: str, values: list[float]) -> None:
    if not all(type(value) in (int, float) and abs(value) <= LONGEST_MS for value in values):
        raise ValueError(f"{name} must be numbers, of at most {LONGEST_MS:.0e}")


def _series(part: Any) -> Any:
    return Series(**part) if isinstance(part, Mapping) else part


class TableCost(CostModel):
    """Milliseconds of a batch, by a measured table."""

    charges_removal = True

    def __init__(self, table: LatencyTable) -> None:
        self.table, self.tokens = table, table.tokens
        self.parts = [
            {name: getattr(kind, name).every_count(self.tokens) for name in ("attention", "mlp", "remove")}
            for kind in table.kinds
        ]
        self.last = None if table.last is None else table.last.every_count(self.tokens)

    @property
    def depth(self) -> int:
        return self.table.depth

    def price(self, kept: Tensor) -> dict[str, Tensor]:
        blocks, removals = self.sums(kept)
        fit = self.table.fit
        return {"latency_ms": fit.blocks * blocks + fit.removals * removals + fit.offset}

    def sums(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """(...) ms of all parts that do the model's own work, and of removing tokens, as the table has them."""
        mlp = torch.as_tensor(kept, dtype=torch.float64)
        attention = attention_counts(mlp, self.tokens)
        blocks = torch.full_like(mlp[..., 0], self.table.around)
        removals = torch.zeros_like(blocks)
        for kind, parts in enumerate(self.parts):
            mine = torch.tensor([k == kind for k in self.table.kind_of], device=mlp.device)
            n, m = attention[..., mine], mlp[..., mine]
            whole = self.table.kinds[kind].whole
            removed_before = _whether(self.tokens - n)
            attended = whole + removed_before * (_read(n, parts["attention"]) - whole)
            own, removes = attended + _read(m, parts["mlp"]), _whether(n - m)
            extra = removes * _read(n, parts["remove"])
            if self.last is not None and kind == self.table.kind_of[-1]:
                short = torch.lerp(own[..., -1:], _read(n[..., -1:], self.last), removes[..., -1:])
                own, extra = torch.cat([own[..., :-1], short], dim=-1), extra[..., :-1]
            blocks, removals = blocks + own.sum(-1), removals + extra.sum(-1)
        return blocks, removals

    def describe(self) -> dict[str, Any]:
        return {"table": asdict(self.table)}


def _whether(removed: Tensor) -> Tensor:
    """0 without and 1 with removed tokens; between, straight. No slope at either end, as `clamp` has in older torch."""
    return F.hardtanh(removed, 0.0, 1.0)


def _read(at: Tensor, values: Tensor) -> Tensor:
    return read(at, values, mean_slopes(values, WINDOW) if at.requires_grad else None)
