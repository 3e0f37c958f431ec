"""diffrate: learned token compression that makes vision transformers faster."""

from diffrate.compressed import CompressedModel, compress, with_kernels
from diffrate.costs.macs import gmacs
from diffrate.errors import DiffRateError, UnsupportedModelError
from diffrate.exporting import export
from diffrate.operator import Operator
from diffrate.profiling import profile
from diffrate.reduction import restore
from diffrate.saving import load, save
from diffrate.schedule import Schedule, ScheduleError
from diffrate.searching.cosearch import CosearchResult, cosearch
from diffrate.searching.run import SearchResult, search
from diffrate.tokens import Tokens
from diffrate.visualizing import visualize

__version__ = "0.1.0"

__all__ = [
    "CompressedModel",
    "CosearchResult",
    "DiffRateError",
    "Operator",
    "Schedule",
    "ScheduleError",
    "SearchResult",
    "Tokens",
    "UnsupportedModelError",
    "compress",
    "cosearch",
    "export",
    "gmacs",
    "load",
    "profile",
    "restore",
    "save",
    "search",
    "visualize",
    "with_kernels",
]
