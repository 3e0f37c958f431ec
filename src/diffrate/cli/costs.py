"""Options that say what hardware a budget is for, and the cost models behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from diffrate.backbones import backbone_of
from diffrate.cli.output import note
from diffrate.compressed import checked_operator
from diffrate.costs import CostModel, Design, GemminiCost, LatencyTable, TableCost, Workload
from diffrate.costs.gemmini.cost import CLOCK_MHZ
from diffrate.costs.gemmini.matmul import Energies
from diffrate.devices import device_name, resolve_device
from diffrate.errors import DiffRateError
from diffrate.operator import Operator

HARDWARE = "Hardware"
GEMMINI = "gemmini"

ProfileTable = Annotated[
    Path | None,
    typer.Option(help="Table of `diffrate profile`, for a budget in ms a batch.", rich_help_panel=HARDWARE),
]
ProfileBatchSize = Annotated[
    int | None, typer.Option(help="The batch size that the table must be for.", rich_help_panel=HARDWARE)
]
ProfileDtype = Annotated[
    str | None, typer.Option(help="The number type that the table must be for.", rich_help_panel=HARDWARE)
]
AnyTable = Annotated[
    bool,
    typer.Option(
        "--any-table", help="Use a table of another model, device or operator.", rich_help_panel=HARDWARE
    ),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        help="gemmini (its default design) or a design file of `diffrate cosearch`, for ms, mW and mJ an image.",
        rich_help_panel=HARDWARE,
    ),
]
ClockMhz = Annotated[
    float, typer.Option(help="Clock of the accelerator.", min=1.0, max=1e6, rich_help_panel=HARDWARE)
]
DramPj = Annotated[
    float,
    typer.Option(
        help="pJ a byte from main memory (DDR 100, LPDDR4 64); 0 counts the chip alone.",
        min=0.0,
        max=1e6,
        rich_help_panel=HARDWARE,
    ),
]
CLOCK = CLOCK_MHZ


def read_costs(
    model: nn.Module,
    name: str,
    device: str | None,
    table: Path | None,
    batch_size: int | None,
    dtype: str | None,
    any_table: bool,
    hardware: str | None,
    clock_mhz: float,
    dram_pj: float,
    operator: Operator,
) -> list[CostModel]:
    """The cost models that the options ask for, beside MACs, for tokens that are removed by `operator`."""
    costs: list[CostModel] = []
    if table is not None:
        measured = LatencyTable.load(table)
        try:
            layout = backbone_of(model).layout
            measured.check(
                layout, name, device_name(resolve_device(device)), batch_size, dtype,
                operator=checked_operator(operator, layout),
            )  # fmt: skip
        except DiffRateError as error:
            if not any_table or measured.depth != layout.depth or measured.tokens != layout.tokens:
                raise
            note(str(error).partition(";")[0])
        costs.append(TableCost(measured))
    elif batch_size is not None or dtype is not None or any_table:
        raise DiffRateError("--profile-batch-size, --profile-dtype and --any-table go with a --profile-table")
    if hardware is not None:
        design = Design() if hardware == GEMMINI else Design.load(hardware)
        costs.append(GemminiCost(workload(model, clock_mhz, dram_pj), design))
    return costs


def workload(model: nn.Module, clock_mhz: float, dram_pj: float) -> Workload:
    return Workload.of(model, clock_mhz=clock_mhz, energies=Energies(dram_byte=dram_pj))
