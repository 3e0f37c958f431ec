"""A step as a CUDA graph: the same kernels, launched together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP = 3  # calls that run as they are before the graph is recorded: they compile and plan its kernels


class Replayed:
    """A function of tensors that is recorded on a GPU, once it has seen the same shapes a few times, and replayed.

    What it reads besides its arguments must stay where it is in memory, and may change there. Where recording fails,
    because the function waits for the device, it goes on running as it is.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self.function = function
        self.kind: tuple[object, ...] = ()
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[Tensor] = []
        self.outputs: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if not inputs[0].is_cuda:
            return self.function(*inputs)
        kind = tuple((x.shape, x.dtype) for x in inputs)
        if kind != self.kind:
            self.kind, self.calls, self.graph = kind, 0, None
        self.calls += 1
        if self.calls == WARM_UP + 1:
            self._record(inputs)
        if self.graph is None:
            return self._run(inputs)
        for ours, theirs in zip(self.inputs, inputs, strict=True):
            ours.copy_(theirs)
        self.graph.replay()
        return tuple(x.clone() for x in self.outputs)

    def _run(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.calls > WARM_UP:
            return self.function(*inputs)
        # Beside the default stream, as what is to be recorded must be warmed up.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outputs = self.function(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        return outputs

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = [x.clone() for x in inputs]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.outputs = self.function(*self.inputs)
        except RuntimeError:
            self.inputs, self.outputs = [], ()
            return
        self.graph = graph
