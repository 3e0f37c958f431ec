"""ONNX: graphs of operators that every runtime has, and onnxruntime to check and to time them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrate.errors import DiffRateError
from diffrate.libraries import optional

OPSET = 18  # of 2022: old enough for most runtimes
INPUT, OUTPUT = "images", "logits"


def check_installed() -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        optional(package)


def write(graph: torch.export.ExportedProgram, path: Path) -> None:
    """The graph as an ONNX file; weights above 2 GB go to a file of their own beside it."""
    op: Any = getattr(optional("onnxscript"), f"opset{OPSET}")

    def stable_sort(values: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
        # Of equal values TopK takes the one with the lower index first, as a stable sort does.
        return op.TopK(values, op.Shape(values, start=dim), axis=dim, largest=int(descending), sorted=1)

    remarks = logging.getLogger("onnxscript")
    level = remarks.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        remarks.setLevel(logging.ERROR)
        try:
            program: Any = torch.onnx.export(
                graph,
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=[INPUT],
                output_names=[OUTPUT],
                custom_translation_table={torch.ops.aten.sort.stable: stable_sort},
            )
            program.save(str(path))
        except Exception as error:  # the exporter raises its own kinds for operators that it does not know
            reason = str(error).strip().splitlines()
            raise DiffRateError(
                f"torch cannot write this model as ONNX: {reason[-1] if reason else error}"
            ) from error
        finally:
            remarks.setLevel(level)


def runner(path: Path, threads: int = 0) -> Callable[[Tensor], Tensor]:
    """The file in onnxruntime on the CPU; 0 threads: as many as torch has."""
    onnxruntime: Any = optional("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        (output,) = session.run(None, {INPUT: images.numpy()})
        return torch.from_numpy(output)

    return run
