"""Gemmini designs: the eight parameters of the paper's search space, and which of its designs can be built.

The space has 128,000 designs; Gemmini's generator accepts 17,016 of them. Designs travel through the cost model as
rows of numbers (D, 8), in the order of PARAMETERS.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrate.errors import DiffRateError, shown
from diffrate.schedule import check_is_file

# The paper's table "Gemmini Search Space"; memories in KB. The bus is Gemmini's DMA, from memory to scratchpad.
PARAMETERS: dict[str, tuple[int, ...]] = {
    "tile_rows": (1, 2, 4, 8),
    "tile_columns": (1, 2, 4, 8),
    "mesh_rows": (4, 8, 16, 32),
    "mesh_columns": (4, 8, 16, 32),
    "bus_bits": (64, 128, 256, 512),
    "scratchpad_banks": (1, 2, 4, 8, 16),
    "scratchpad_kb": (256, 512, 1024, 2048, 4096),
    "accumulator_kb": (64, 128, 256, 512, 1024),
}
ACCUMULATOR_BANKS = 2  # Gemmini's default; the paper's space leaves it alone
WORD = 4  # bytes of an accumulator entry


@dataclass(frozen=True)
class Design:
    """One Gemmini: an array of tiles of processing elements, its memories and its way to main memory.

    The default is Gemmini's own: 16x16, 256 KB scratchpad in 4 banks, 64 KB accumulator, 128 bit bus.
    """

    tile_rows: int = 1
    tile_columns: int = 1
    mesh_rows: int = 16
    mesh_columns: int = 16
    bus_bits: int = 128
    scratchpad_banks: int = 4
    scratchpad_kb: int = 256
    accumulator_kb: int = 64

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int or not 1 <= value <= 1 << 20:
                raise DiffRateError(f"{name} of a Gemmini design must be a whole number, not {shown(value)}")

    @property
    def rows(self) -> int:
        """Processing elements in a column: the array's side."""
        return self.tile_rows * self.mesh_rows

    def row(self) -> Tensor:
        """(8,) the design as the cost model takes it."""
        return torch.tensor([float(v) for v in asdict(self).values()], dtype=torch.float64)

    @classmethod
    def from_row(cls, row: Tensor) -> Design:
        return cls(*(int(v) for v in row.tolist()))

    @property
    def is_buildable(self) -> bool:
        return bool(is_buildable(self.row()))

    def __str__(self) -> str:
        side = f"{self.rows}x{self.tile_columns * self.mesh_columns}"
        tiles = f"tiles {self.tile_rows}x{self.tile_columns}, meshes {self.mesh_rows}x{self.mesh_columns}"
        memory = f"scratchpad {self.scratchpad_kb} KB in {self.scratchpad_banks} banks"
        return (
            f"{side} array ({tiles}), {memory}, accumulator {self.accumulator_kb} KB, bus {self.bus_bits} bit"
        )

    @classmethod
    def from_dict(cls, values: Any) -> Design:
        known = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != known:
            raise DiffRateError(f"a Gemmini design has the parameters {', '.join(sorted(known))}")
        design = cls(**values)
        if not design.is_buildable:
            raise DiffRateError(f"Gemmini cannot be built as {design}: {design.why_not()}")
        return design

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Design:
        """A design from a JSON file: the parameters themselves, or what a co-search wrote, under "design"."""
        check_is_file(Path(path))
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise DiffRateError(f"cannot read the design {path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise DiffRateError(f"{path} is not a JSON design: {error}") from error
        if isinstance(values, dict) and "design" in values:
            values = values["design"]
        return cls.from_dict(values)

    def why_not(self) -> str:
        """What Gemmini's generator would say against the design."""
        side, columns = self.rows, self.tile_columns * self.mesh_columns
        if side != columns:
            return f"its array must be square, and this one is {side}x{columns}"
        if self.scratchpad_banks < 2:
            return "its scratchpad needs more than one bank"
        return f"a bank must hold a power-of-two number of rows that is a multiple of {side}"


def is_buildable(designs: Tensor) -> Tensor:
    """(...,) of designs (..., 8): which of them Gemmini's generator accepts.

    A square array, more than one scratchpad bank, and banks, of scratchpad and accumulator, whose rows are a power of
    two and a multiple of the array's side.
    """
    tile_r, tile_c, mesh_r, mesh_c, _, banks, scratchpad, accumulator = designs.unbind(-1)
    side = tile_r * mesh_r
    good = (side == tile_c * mesh_c) & (banks > 1)
    for kb, word, parts in ((scratchpad, 1, banks), (accumulator, WORD, ACCUMULATOR_BANKS)):
        rows = kb * 1024 / (word * side) / parts
        good = good & (rows >= 1) & (rows.log2() % 1 == 0) & (rows % side == 0)
    return good


@functools.cache
def buildable_designs() -> Tensor:
    """(17016, 8) every design of the paper's space that can be built."""
    every = torch.cartesian_prod(*(torch.tensor(v, dtype=torch.float64) for v in PARAMETERS.values()))
    return every[is_buildable(every)]


def designs_within(largest_array: int | None) -> Tensor:
    """(D, 8) the designs that can be built with an array of at most this side: nothing else stands for area."""
    designs = buildable_designs()
    if largest_array is None:
        return designs
    sides = designs[:, 0] * designs[:, 2]
    if largest_array < float(sides.min()):
        least = int(sides.min())
        raise DiffRateError(
            f"no array is as small as {largest_array}x{largest_array}: the smallest is {least}x{least}"
        )
    return designs[sides <= largest_array]
