"""One matrix product on Gemmini: how it is tiled, how many cycles it takes and how much energy.

C[I, J] = A[I, K] B[K, J] in int8, weight-stationary. All functions are elementwise over tensors of shapes and designs
that broadcast against each other. The tiling is Gemmini's own rule (its tiled_matmul_auto). The two constants of time
were fitted on RTL cycle counts of a 16x16 array with a 128 bit bus; how they change elsewhere is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from diffrate.costs.gemmini.design import WORD


class Shape(NamedTuple):
    """The sizes of a product, each a tensor."""

    i: Tensor
    k: Tensor
    j: Tensor


class Array(NamedTuple):
    """What a product sees of a design, each a tensor: array sides, memories in bytes, bus in bytes a cycle."""

    rows: Tensor
    columns: Tensor
    fill: Tensor  # mesh rows + mesh columns: cycles for a value to cross the array
    bus: Tensor
    banks: Tensor
    scratchpad: Tensor
    accumulator: Tensor

    @classmethod
    def of(cls, designs: Tensor) -> Array:
        """Of designs (..., 8)."""
        tile_r, tile_c, mesh_r, mesh_c, bus, banks, scratchpad, accumulator = designs.double().unbind(-1)
        return cls(
            tile_r * mesh_r, tile_c * mesh_c, mesh_r + mesh_c, bus / 8, banks, scratchpad * 1024, accumulator * 1024
        )  # fmt: skip

    def expand(self, trailing: int) -> Array:
        """With so many dimensions more at the end, to broadcast against shapes."""
        return Array(*(t.reshape(t.shape + (1,) * trailing) for t in self))


class Tiling(NamedTuple):
    """Blocks of the array's side that are held at once, along I, J and K."""

    i: Tensor
    j: Tensor
    k: Tensor


@dataclass(frozen=True)
class Overheads:
    """Cycles that the array itself does not need, fitted on RTL counts of a 16x16 array with a 128 bit bus."""

    block: float = 3.9  # on top of the array's side, for each block of a product
    product: float = 1650.0  # once a product: issuing, first addresses, last write


@dataclass(frozen=True)
class Energies:
    """Picojoules of an operation, at 40 to 45 nm (Accelergy's tables; CACTI 7 for the memories), and leakage in mW."""

    mac: float = 0.561 + 0.487
    scratchpad_byte: float = 6.6  # at 256 KB; grows with the size to the power 0.52
    accumulator_kb: float = 0.1005  # a word, per KB and column
    accumulator_word: float = 1.94
    dram_byte: float = 0.0  # 0: the chip alone, as in the paper's table; DDR: 100, LPDDR4: 64
    leakage_mw: float = 0.02


def tiling(shape: Shape, array: Array) -> Tiling:
    """Gemmini's rule: square in I and J within half of each memory, then J, I and K grow in turn while they fit."""
    rows, columns = array.rows, array.columns
    half_scratchpad, half_accumulator = array.scratchpad / 2, array.accumulator / 2
    limits = _stacked(_blocks(shape.i, rows), _blocks(shape.j, columns), _blocks(shape.k, rows), rows)[:3]
    side = (half_accumulator / (WORD * rows * columns)).sqrt().floor().clamp_min(1)
    deep = (half_scratchpad / 2 / (rows * torch.maximum(rows, columns)) / side).floor().clamp_min(1)
    start = _stacked(side, side, deep, limits[0])[:3].minimum(limits)

    def fits(tiles: Tensor) -> Tensor:
        i, j, k = tiles
        in_scratchpad = i * k * rows * rows + k * j * rows * columns <= half_scratchpad
        return in_scratchpad & (WORD * i * j * rows * columns <= half_accumulator)

    return Tiling(*_grown(start, limits, fits).unbind(0))


def _grown(tiles: Tensor, limits: Tensor, fits: Callable[[Tensor], Tensor]) -> Tensor:
    """(3, ...) tiles I, J, K, each raised by one in turn, J first, until none can be.

    An axis that cannot grow once never will, for the others only take more room. So many rounds are taken at once as
    fit with every growing axis, and then one in turn, which ends at least one axis: three times at most.
    """
    growing = tiles < limits
    jumps = [2**k for k in reversed(range(int((limits - tiles).max()).bit_length()))]
    while growing.any():
        for rounds in jumps:
            more = tiles + rounds * growing
            tiles = torch.where((more <= limits).all(dim=0) & fits(more), more, tiles)
        for axis in (1, 0, 2):
            more = tiles.clone()
            more[axis] += growing[axis]
            good = (more[axis] <= limits[axis]) & fits(more)
            tiles = torch.where(good, more, tiles)
            growing[axis] &= good
    return tiles


def _stacked(*values: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*values))


class Traffic(NamedTuple):
    """Bytes of A and B from memory, and how often the outer loops run along I, J, K."""

    a: Tensor
    b: Tensor
    trips: Tiling


def traffic(shape: Shape, array: Array, tiles: Tiling) -> Traffic:
    blocks = (_blocks(shape.i, array.rows), _blocks(shape.j, array.columns), _blocks(shape.k, array.rows))
    trips = Tiling(*(_blocks(n, t) for n, t in zip(blocks, tiles, strict=True)))
    # What fits in both halves of the double buffer stays there.
    a = shape.i * shape.k * torch.where(trips.i * trips.k <= 2, 1.0, trips.j)
    b = shape.k * shape.j * torch.where(trips.j * trips.k <= 2, 1.0, trips.i)
    return Traffic(a, b, trips)


def cycles(shape: Shape, array: Array, tiles: Tiling, overheads: Overheads = Overheads()) -> Tensor:
    """Cycles of a product: the slowest of computing, loading and storing, and what cannot overlap with it."""
    rows, columns, bus = array.rows, array.columns, array.bus
    loaded = traffic(shape, array, tiles)
    n_i, n_j, n_k = _blocks(shape.i, rows), _blocks(shape.j, columns), _blocks(shape.k, rows)
    compute = n_i * n_j * n_k * (rows + overheads.block)
    # With one bank, weights cannot be read while activations are.
    compute = compute + torch.where(array.banks < 2, n_j * n_k * loaded.trips.i * rows, 0.0)
    load, store = (loaded.a + loaded.b) / bus, shape.i * shape.j / bus
    depth = torch.minimum(rows, shape.k)
    first = (tiles.i * rows * depth + depth * tiles.j * columns) / bus
    last = tiles.i * rows * columns / bus
    steady = torch.maximum(torch.maximum(compute, load), store)
    return steady + first + last + array.fill + overheads.product


def energy_pj(shape: Shape, array: Array, tiles: Tiling, energies: Energies) -> Tensor:
    """Picojoules of a product, without leakage."""
    loaded = traffic(shape, array, tiles)
    n_j, n_k = _blocks(shape.j, array.columns), _blocks(shape.k, array.rows)
    a, b, c = shape.i * shape.k, shape.k * shape.j, shape.i * shape.j
    scratchpad = a * n_j + b * loaded.trips.i + loaded.a + loaded.b
    words = 2 * c * n_k + c
    kb = array.accumulator / 1024
    return (
        a * shape.j * energies.mac
        + scratchpad * energies.scratchpad_byte * (array.scratchpad / 1024 / 256) ** 0.52
        + words * (energies.accumulator_kb * kb / array.columns + energies.accumulator_word)
        + (loaded.a + loaded.b + c) * energies.dram_byte
    )


def _blocks(n: Tensor, side: Tensor) -> Tensor:
    return torch.ceil(n / side)
