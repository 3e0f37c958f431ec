"""AOTInductor: the graph compiled ahead of time for this machine's CPU, to run without Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from diffrate.errors import DiffRateError


def check_compiler() -> None:
    """Say so where there is none, before anything takes time."""
    from torch._inductor import cpp_builder, exc  # loading Inductor takes seconds

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        raise DiffRateError("aoti compiles for this machine and needs a C++ compiler such as g++") from None


def write(graph: torch.export.ExportedProgram, path: Path) -> None:
    """A .pt2 package of compiled code and weights."""
    if path.suffix != ".pt2":
        raise DiffRateError(f"a compiled package is named *.pt2, not {path.name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about itself
        try:
            torch._inductor.aoti_compile_and_package(graph, package_path=str(path))
        except Exception as error:  # whatever Inductor or the compiler stumbles on
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise DiffRateError(f"Inductor cannot compile this model: {lines[0]}") from error


def runner(path: Path) -> Callable[[Tensor], Tensor]:
    loaded = torch._inductor.aoti_load_package(str(path))

    def run(images: Tensor) -> Tensor:
        output: Tensor = loaded(images)
        return output

    return run
