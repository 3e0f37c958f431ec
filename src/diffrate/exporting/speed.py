"""What a schedule is worth in onnxruntime: the exported model against the exported whole one, timed in turns."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diffrate.compressed import CompressedModel
from diffrate.costs.macs import gmacs
from diffrate.exporting import export, onnx_graph
from diffrate.speed import UNCOMPRESSED, Entrant, Speed, compared, in_turns

MODE = "onnxruntime"


def bench_onnx(
    compressed: CompressedModel,
    path: str | Path,
    batch_sizes: Sequence[int] = (1,),
    repeats: int = 20,
    name: str = "compressed",
) -> Iterator[list[Speed]]:
    """Rows for each batch size: the whole model, exported for the purpose, and the file at `path`."""
    whole, layout = compressed.original, compressed.backbone.layout
    rows = [
        Entrant(UNCOMPRESSED, whole, gmacs(whole)),
        Entrant(name, compressed, gmacs(whole, compressed.schedule)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        export(whole, Path(folder) / "whole.onnx")
        sessions = {
            UNCOMPRESSED: onnx_graph.runner(Path(folder) / "whole.onnx"),
            name: onnx_graph.runner(Path(path)),
        }
        for batch_size in batch_sizes:
            images = torch.randn(batch_size, layout.in_chans, *layout.img_size)
            runs: dict[str, Callable[[], Any]] = {row: partial(run, images) for row, run in sessions.items()}
            samples = in_turns(runs, repeats, torch.device("cpu"))
            measured = {row: (seconds, None) for row, seconds in samples.items()}
            yield compared(rows, measured, batch_size, MODE, "float32")
