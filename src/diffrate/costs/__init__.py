"""Cost models: what a schedule costs on a model, in MACs today, behind one interface."""

from diffrate.costs.macs import MacCost, gmacs

__all__ = ["MacCost", "gmacs"]
