"""Gemmini, an accelerator for matrix products: what a network costs on any of its designs (paper, appendix B)."""

from diffrate.costs.gemmini.cost import GemminiCost, Workload
from diffrate.costs.gemmini.design import PARAMETERS, Design, buildable_designs, is_buildable

__all__ = ["PARAMETERS", "Design", "GemminiCost", "Workload", "buildable_designs", "is_buildable"]
