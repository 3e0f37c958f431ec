"""A network on Gemmini: latency, energy and power of a schedule, on one design or on thousands at once.

Only matrix products are counted; softmax, norms and GELU are modelled by no tool, and `vector_ops` adds a simple term
for them. Power is energy over a fixed period, by default that of the uncompressed model on the same design, as in the
paper's table, whose power falls with the MACs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffrate.backbones import Backbone, backbone_of
from diffrate.backbones.base import BlockProducts
from diffrate.costs.base import CostModel, attention_counts, mean_slopes, read
from diffrate.costs.gemmini.design import Design
from diffrate.costs.gemmini.matmul import Array, Energies, Shape, cycles, energy_pj, tiling
from diffrate.errors import DiffRateError

CLOCK_MHZ = 354.0  # at which DeiT-S takes the paper's 68.1 ms on Gemmini's default array
SLOPES = ("table", "paper")


@dataclass(frozen=True)
class Spent:
    """Cycles and picojoules, leakage not included; tensors of equal shape."""

    cycles: Tensor
    pj: Tensor

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.cycles + other.cycles, self.pj + other.pj)


@dataclass(frozen=True)
class Workload:
    """The matrix products of a network, and what they cost on designs (D, 8)."""

    tokens: int
    blocks: tuple[BlockProducts, ...]
    around: tuple[tuple[int, int, int], ...]  # embedding and head: (rows, in, out)
    clock_mhz: float = CLOCK_MHZ
    energies: Energies = Energies()
    vector_ops: bool = False
    period_ms: float | None = None  # how often an image comes; None: as often as the whole model can take one

    @classmethod
    def of(cls, model: nn.Module, **changes: object) -> Workload:
        return cls.of_backbone(backbone_of(model), **changes)

    @classmethod
    def of_backbone(cls, backbone: Backbone, **changes: object) -> Workload:
        blocks = tuple(backbone.block_products(i) for i in range(backbone.layout.depth))
        return cls(backbone.layout.tokens, blocks, tuple(backbone.edge_products()), **changes)  # type: ignore[arg-type]

    @property
    def depth(self) -> int:
        return len(self.blocks)

    def price(self, designs: Tensor, kept: Sequence[float] | Tensor) -> dict[str, Tensor]:
        """Each metric (D,) of a schedule, given as the whole counts that the blocks keep, on designs (D, 8)."""
        spent = self.spent(designs, kept)
        period = spent.cycles  # not looked at where the period is given
        if self.period_ms is None:
            period = self.spent(designs, [self.tokens] * self.depth).cycles
        return self.metrics(spent, period)

    def metrics(self, spent: Spent, period: Tensor) -> dict[str, Tensor]:
        """Costs in their units; `period` in cycles is how often an image comes."""
        ms = spent.cycles / (1e3 * self.clock_mhz)
        period_ms = period / (1e3 * self.clock_mhz) if self.period_ms is None else self.period_ms
        mj = spent.pj * 1e-9 + self.energies.leakage_mw * ms * 1e-3
        return {"latency_ms": ms, "energy_mj": mj, "power_at_rate_mw": mj / period_ms * 1e3}

    def spent(self, designs: Tensor, kept: Sequence[float] | Tensor) -> Spent:
        """What one image costs on designs (D, 8), block l keeping kept[l] tokens."""
        mlp = torch.as_tensor(kept, dtype=torch.float64)
        attention = attention_counts(mlp, self.tokens)
        total = self.around_blocks(designs)
        for kind in dict.fromkeys(self.blocks):
            mine = torch.tensor([block == kind for block in self.blocks])
            for counts, of in ((attention[mine], self.attention), (mlp[mine], self.mlp)):
                distinct, often = counts.unique(return_counts=True)
                spent = of(designs, kind, distinct)
                total = total + Spent((spent.cycles * often).sum(-1), (spent.pj * often).sum(-1))
        return total

    def around_blocks(self, designs: Tensor) -> Spent:
        rows, inside, outside = torch.tensor(self.around, dtype=torch.float64).unbind(1)
        spent = self._products(designs, Shape(rows, inside, outside))
        return Spent(spent.cycles.sum(-1), spent.pj.sum(-1))

    def attention(self, designs: Tensor, block: BlockProducts, n: Tensor) -> Spent:
        """(D, T) one block's attention with n (T,) tokens: projections, and each head's two products."""
        fixed = torch.ones_like(n)
        shapes = [(n, fixed * i, fixed * o) for i, o in block.attention]
        shapes += [(n, fixed * block.head_dim, n), (n, n, fixed * block.head_dim)]
        often = torch.tensor([1.0] * len(block.attention) + [float(block.heads)] * 2)
        width = block.heads * block.head_dim
        return self._sum(designs, shapes, often, block.heads * n * n + n * width)

    def mlp(self, designs: Tensor, block: BlockProducts, n: Tensor) -> Spent:
        """(D, T) one block's MLP with n (T,) tokens."""
        fixed = torch.ones_like(n)
        shapes = [(n, fixed * i, fixed * o) for i, o in block.mlp]
        return self._sum(designs, shapes, torch.ones(len(shapes)), sum(n * i for i, _ in block.mlp))

    def _sum(
        self, designs: Tensor, shapes: Sequence[tuple[Tensor, ...]], often: Tensor, elements: Tensor | int
    ) -> Spent:
        """(D, T) over the products of a half block, each `often`; `elements` pass through softmax, norm or GELU."""
        shape = Shape(*(torch.stack(sizes) for sizes in zip(*shapes, strict=True)))  # each (P, T)
        spent = self._products(designs, shape)
        weight = often[:, None].double()
        taken = (spent.cycles * weight).sum(-2)
        if self.vector_ops:
            taken = taken + elements / Array.of(designs).expand(1).columns
        return Spent(taken, (spent.pj * weight).sum(-2))

    def _products(self, designs: Tensor, shape: Shape) -> Spent:
        """(D, …) each product of a shape (…) on designs (D, 8)."""
        array = Array.of(designs)
        # Designs differ in more than a product sees: of the 17,016 that can be built, 700 are different to it.
        seen = torch.stack(
            [*array._replace(fill=torch.zeros_like(array.fill), banks=array.banks.clamp_max(2))], dim=-1
        )
        kinds, which = seen.unique(dim=0, return_inverse=True)
        trailing = shape.i.dim()
        kind = Array(*kinds.unbind(-1)).expand(trailing)
        tiles = tiling(shape, kind)
        taken = cycles(shape, kind, tiles)[which] + array.expand(trailing).fill
        nothing = shape.i == 0
        pj = energy_pj(shape, kind, tiles, self.energies)[which]
        return Spent(taken.masked_fill(nothing, 0.0), pj.masked_fill(nothing, 0.0))


class GemminiCost(CostModel):
    """A network on one design: tables over token counts, with slopes for a search.

    slopes  "table": of the table itself, smoothed over one array side; "paper": ((1 - a) + SG(a)) F'(a), whose slope
            per token is F' / N, block by block (the paper has the sign of the compression rate a the other way round).
    """

    def __init__(self, workload: Workload, design: Design = Design(), slopes: str = "table") -> None:
        if slopes not in SLOPES:
            raise DiffRateError(f"slopes must be one of {', '.join(SLOPES)}, not {slopes!r}")
        self.workload, self.design, self.slopes = workload, design, slopes
        self.tokens = workload.tokens
        designs = design.row()[None]
        n = torch.arange(self.tokens + 1, dtype=torch.float64)
        self.kinds = list(dict.fromkeys(workload.blocks))
        self.tables = [(workload.attention(designs, k, n), workload.mlp(designs, k, n)) for k in self.kinds]
        self.around = workload.around_blocks(designs)
        self.period = workload.spent(designs, [float(self.tokens)] * self.depth).cycles[0]

    @property
    def depth(self) -> int:
        return self.workload.depth

    def price(self, kept: Tensor) -> dict[str, Tensor]:
        mlp = torch.as_tensor(kept, dtype=torch.float64)
        attention = attention_counts(mlp, self.tokens)
        taken, pj = (
            t.to(mlp.device).expand(mlp.shape[:-1]) for t in (self.around.cycles[0], self.around.pj[0])
        )
        for kind, tables in zip(self.kinds, self.tables, strict=True):
            mine = torch.tensor([block == kind for block in self.workload.blocks], device=mlp.device)
            for counts, table in zip((attention, mlp), tables, strict=True):
                taken = taken + self._read(counts[..., mine], table.cycles[0])
                pj = pj + self._read(counts[..., mine], table.pj[0])
        return self.workload.metrics(Spent(taken, pj), self.period.to(mlp.device))

    def _read(self, counts: Tensor, values: Tensor) -> Tensor:
        slopes = None
        if counts.requires_grad:
            slopes = (
                values[1:] / self.tokens if self.slopes == "paper" else mean_slopes(values, self.design.rows)
            )
        return read(counts, values, slopes).sum(-1)

    def describe(self) -> dict[str, Any]:
        energies, clock = asdict(self.workload.energies), self.workload.clock_mhz
        settings: dict[str, Any] = {
            "energies": energies,
            "clock_mhz": clock,
            "vector_ops": self.workload.vector_ops,
        }
        settings["period_ms"] = self.workload.period_ms
        return {"gemmini": asdict(self.design), "slopes": self.slopes, **settings}
