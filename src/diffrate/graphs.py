"""CUDA graphs: a call recorded once and replayed, so that launching its kernels takes no time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def warm_up(run: Callable[[], Any], device: torch.device, calls: int) -> None:
    """Run it a few times on a stream of its own: kernels are tuned and compiled here, which no graph can record."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(calls):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)


def recorded(run: Callable[[], Any]) -> Callable[[], Any]:
    """A warmed-up call as a graph. It reads and writes where the recording did: `run` must outlive it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay
