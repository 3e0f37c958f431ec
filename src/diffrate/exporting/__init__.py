"""Compressed models as files for other runtimes: export, check against PyTorch, and only then write.

    torch-export  a .pt2 file for torch.export.load
    onnx          an .onnx file of standard operators, for onnxruntime and others
    aoti          a .pt2 package compiled by Inductor for this machine's CPU
    safetensors   the folder of diffrate.save

Graphs are of the plain PyTorch path, in fp32 on the CPU, for the model's image size and any batch.
"""

from __future__ import annotations

import copy
import io
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffrate import kernels
from diffrate.compressed import CompressedModel, compress
from diffrate.errors import DiffRateError
from diffrate.exporting import aoti, onnx_graph
from diffrate.exporting.checking import Run, agreement
from diffrate.outputs import main_output
from diffrate.saving import landing, load, save

FORMATS = ("torch-export", "onnx", "aoti", "safetensors")
TOLERANCE = 1e-3
MOST_TIES = 0.1  # of the images


@dataclass(frozen=True)
class Exported:
    """A file that was written, and how well it agrees with PyTorch (see checking.Agreement)."""

    path: str
    to: str
    megabytes: float
    images: int
    largest_difference: float
    ties: int


class Outputs(nn.Module):
    """A model that returns one tensor, whatever its library wraps it in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return main_output(self.model(images))


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    to: str = "onnx",
    images: Tensor | None = None,
    tolerance: float = TOLERANCE,
    saving: Mapping[str, Any] | None = None,
) -> Exported:
    """Write `model`, compressed or not, to `path` in the format `to`, if it then gives what PyTorch gives.

    images  (B, C, H, W) to compare on, preprocessed, at least two; without them noise, which says less.
    saving  for safetensors: arguments of diffrate.save.
    """
    path = Path(path)
    if to not in FORMATS:
        raise DiffRateError(f"an export format is one of {', '.join(FORMATS)}, not {to!r}")
    if saving and to != "safetensors":
        raise DiffRateError(f"{', '.join(sorted(saving))} is for safetensors alone")
    if to == "onnx":
        onnx_graph.check_installed()
    elif to == "aoti":
        aoti.check_compiler()
    compressed = model if isinstance(model, CompressedModel) else compress(model)
    layout = compressed.backbone.layout
    shape = (layout.in_chans, *layout.img_size)
    if images is None:
        images = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    if tuple(images.shape[1:]) != shape or len(images) < 2:
        raise DiffRateError(
            f"the check needs at least two images of {'x'.join(map(str, shape))}, not {tuple(images.shape)}"
        )
    if to != "safetensors" and path.is_dir():
        raise DiffRateError(f"{path} is a folder: give the name of a file")

    lent = Outputs(copy.deepcopy(model)).to("cpu", torch.float32).eval()
    images = images.detach().to("cpu", torch.float32)
    with (
        landing(path if to == "safetensors" else path.parent) as made,
        kernels.using("plain"),
        torch.no_grad(),
    ):
        if to == "safetensors":
            save(compressed, made, **(saving or {}))
            run: Run = Outputs(load(made).float())
        else:
            run = _write(traced(lent, shape), to, made / path.name)
        found = agreement(lent, run, images, tolerance)
        if not found.largest_difference <= tolerance or found.ties > MOST_TIES * len(images):
            raise DiffRateError(
                f"the exported model differs from PyTorch by {found.largest_difference:.2g} on {len(images)} images "
                f"({found.ties} more are ties), and {tolerance:g} is allowed: nothing was written"
            )
        size = sum(file.stat().st_size for file in made.iterdir()) / 1e6
    return Exported(str(path), to, size, **asdict(found))


def traced(model: nn.Module, shape: tuple[int, ...]) -> torch.export.ExportedProgram:
    """The graph of a model of one tensor in and one out, for any batch of images of this shape."""
    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about itself
        try:
            return torch.export.export(
                model, (torch.zeros(2, *shape),), dynamic_shapes=({0: batch},), strict=False
            )
        except Exception as error:  # a model that looks at its values, or does what the tracer does not know
            raise DiffRateError(f"torch.export cannot trace this model: {_first_line(error)}") from error


def _write(graph: torch.export.ExportedProgram, to: str, path: Path) -> Run:
    """Write the graph, and give back what runs the file."""
    if to == "onnx":
        onnx_graph.write(graph, path)
        return onnx_graph.runner(path)
    if to == "aoti":
        aoti.write(graph, path)
        return aoti.runner(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(graph, content := io.BytesIO())
        path.write_bytes(content.getvalue())  # torch has its own words for a full disk
        loaded: Run = torch.export.load(path).module()
        return loaded


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
