"""Cost models behind one interface: what a schedule costs on a model, in MACs, on an accelerator, or as measured."""

from diffrate.costs.base import METRICS, CostModel, Costs
from diffrate.costs.gemmini import Design, GemminiCost, Workload
from diffrate.costs.macs import MacCost, gmacs
from diffrate.costs.table import LatencyTable, TableCost

__all__ = [
    "METRICS",
    "CostModel",
    "Costs",
    "Design",
    "GemminiCost",
    "LatencyTable",
    "MacCost",
    "TableCost",
    "Workload",
    "gmacs",
]
