"""Forward and backward of one step: compiled, as a CUDA graph, and in portions where memory is short."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, release_memory
from torch import Tensor, nn

from diffrate.portions import Portions
from diffrate.training.batches import Part
from diffrate.training.objective import Objective
from diffrate.training.recipe import Recipe


class Gradients:
    """The gradients of a model that accelerate prepared, by an objective and as a recipe asks for them."""

    def __init__(
        self, prepared: nn.Module, objective: Objective, recipe: Recipe, accelerator: Accelerator
    ) -> None:
        self.prepared, self.objective, self.accelerator = prepared, objective, accelerator
        processes = accelerator.num_processes
        sharded = accelerator.distributed_type == DistributedType.FSDP
        # Small steps wait for their kernels to be launched, but not as a graph.
        self.graphs = recipe.compile and can_be_graphs(accelerator.device, sharded)
        self.running: Any = prepared
        # What processes say to each other cannot be recorded: of several, the model inside is compiled, and the
        # exchange of gradients comes after its backward pass.
        self.inside = accelerator.unwrap_model(prepared) if self.graphs and processes > 1 else None
        if self.inside is not None:
            self.inside.compile(mode="reduce-overhead")
        elif recipe.compile:
            self.running = torch.compile(prepared, mode="reduce-overhead" if self.graphs else None)
        # Of several processes none can try a step again alone: they rehearse the first one.
        self.rehearses = processes > 1 and not sharded
        self.portions = Portions("the training", splits=processes == 1)

    def add(self, drawn: list[Part], seed: Callable[[int], None]) -> Tensor:
        """Leave the gradients of a step's parts with the parameters; their mean loss. `seed` gets a part's number."""
        if self.rehearses:
            self._rehearse(drawn, seed)
        with torch._dynamo.config.patch(optimize_ddp=False) if self.inside is not None else nullcontext():
            return self.portions.fitted(lambda some: self._in_portions(drawn, some, seed), len(drawn[0][0]))

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Within, `prepared` runs as it is written; so it does anyway, unless the model inside it is compiled."""
        with nullcontext() if self.inside is None else torch.compiler.set_stance("force_eager"):
            yield

    def end(self) -> None:
        """Leave the model as it came."""
        if self.inside is not None:
            self.inside._compiled_call_impl = None

    def _in_portions(self, drawn: list[Part], portions: list[slice], seed: Callable[[int], None]) -> Tensor:
        """Forward and backward of all parts, each in portions. What was there is forgotten."""
        accelerator = self.accelerator
        total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        accelerator.step = 0
        self.prepared.zero_grad()
        if self.graphs and len(portions) > 1:
            self._give_up_graphs()
        for part, (images, labels) in enumerate(drawn):
            seed(accelerator.process_index * len(drawn) + part)
            with accelerator.accumulate(self.prepared):
                for portion in portions:
                    last = portion.stop == len(images)
                    share = (portion.stop - portion.start) / len(images)
                    # Processes add their gradients up in the backward pass of the last portion.
                    with nullcontext() if last else accelerator.no_sync(self.prepared):
                        if self.graphs:
                            torch.compiler.cudagraph_mark_step_begin()
                        with accelerator.autocast():  # for the teacher: what accelerate prepared has its own
                            loss = self.objective(self.running, images[portion], labels[portion])
                        accelerator.backward(loss if share == 1 else share * loss)
                    total += share * loss.detach() / len(drawn)
            if self.graphs and part == 0 and len(drawn) > 1:
                # The graph's own are overwritten when it runs again.
                for parameter in self.prepared.parameters():
                    parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        return total

    def _give_up_graphs(self) -> None:
        """Run uncompiled from now on: memory ran out, and graphs hold all that their steps need at any time."""
        warnings.warn("the training goes on uncompiled, without CUDA graphs", RuntimeWarning, stacklevel=2)
        self.end()
        self.graphs, self.running, self.inside = False, self.prepared, None
        torch._dynamo.reset()
        release_memory()

    def _rehearse(self, drawn: list[Part], seed: Callable[[int], None]) -> None:
        """Before the first step of several processes: find what each has memory for, and take the least.

        Later, in the middle of adding up gradients, one of them could not try again alone. Uncompiled, which saves
        compiling what runs once and takes about as much memory; with a teacher, graphs may take more.
        """

        def alone(portions: list[slice]) -> None:
            with self.accelerator.no_sync(self.prepared), self.uncompiled():
                images, labels = drawn[0]
                for portion in portions:
                    with self.accelerator.autocast():
                        loss = self.objective(self.prepared, images[portion], labels[portion])
                    self.accelerator.backward(loss)

        count = len(drawn[0][0])
        seed(0)
        self.portions.splits = True
        self.portions.fitted(alone, count)
        self.prepared.zero_grad()
        fits = torch.tensor([self.portions.most or count], device=self.accelerator.device)
        least = int(self.accelerator.gather(fits).min())
        self.portions.most = None if least == count else least
        self.portions.splits = self.rehearses = False


def can_be_graphs(device: torch.device, sharded: bool) -> bool:
    """Whether steps can be CUDA graphs: shards of weights are gathered within a step, which cannot be recorded."""
    return device.type == "cuda" and not sharded
