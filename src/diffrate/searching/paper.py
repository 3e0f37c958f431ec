"""The paper's recipe: proxies for prune and merge counts, trained through token masks (paper 4-5, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diffrate.backbones import Backbone
from diffrate.errors import DiffRateError
from diffrate.masking import masked_logits
from diffrate.operator import Operator
from diffrate.proxy import DiscreteProxy
from diffrate.schedule import Schedule
from diffrate.searching.budget import Space, project, rounded

OPERATOR = Operator()
LAMBDA = 5.0  # weight of (GMACs - budget)^2
LEARNING_RATE = (0.01, 0.001)
GRANULARITY = 4


class PaperRecipe:
    """One budget's search, as published: uniform start, cross-entropy, AdamW with a cosine, here per step."""

    def __init__(
        self,
        backbone: Backbone,
        space: Space,
        operator: Operator,
        budget: float,
        steps: int,
        reduce: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        if operator.operation == "merge-prune" or operator.choice != "rank":
            raise DiffRateError(
                "the paper's recipe masks tokens by rank: use prune-merge, prune or merge, with choice rank"
            )
        if operator.importance not in ("class-attention", "image-attention"):
            raise DiffRateError("the paper's recipe ranks by class attention or image attention")
        self.backbone, self.space, self.operator = backbone, space, operator
        self.budget, self.steps, self.reduce, self.done = budget, steps, reduce, 0
        last = 0 if backbone.layout.compresses_last_block else 1
        self.compressed = list(range(1, backbone.layout.depth - last))
        patches = backbone.layout.tokens - backbone.layout.prefix
        self.prune = DiscreteProxy(len(self.compressed), patches, GRANULARITY).to(device)
        self.merge = DiscreteProxy(len(self.compressed), patches, GRANULARITY).to(device)
        self.optimizer = torch.optim.AdamW(
            [self.prune.logits, self.merge.logits], lr=LEARNING_RATE[0], weight_decay=0.0
        )

    def step(self, images: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
        """One step of Algorithm 1; the loss stays on the device."""
        first, last = LEARNING_RATE
        progress = self.done / max(self.steps - 1, 1)
        self.optimizer.param_groups[0]["lr"] = last + (first - last) * 0.5 * (
            1 + math.cos(math.pi * progress)
        )
        with torch.enable_grad():
            prune, merge = self.prune(), self.merge()
            logits = masked_logits(self.backbone, images, prune, merge, self.compressed, self.operator)
            task = F.cross_entropy(logits.float(), labels)
            over = self.gmacs(prune.count, merge.count) - self.budget
            gradients = torch.autograd.grad(
                task + (LAMBDA * over.square()).float(),
                [self.prune.logits, self.merge.logits],
                allow_unused=True,
            )
        for parameter, gradient in zip((self.prune.logits, self.merge.logits), gradients, strict=True):
            # Each process has its share of the batch: the sum of shares is the gradient of the whole.
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            total = self.reduce(
                torch.cat([gradient.flatten() * len(images), gradient.new_tensor([len(images)])])
            )
            parameter.grad = (total[:-1] / total[-1]).view_as(parameter)
        self.optimizer.step()
        self.done += 1
        return task.detach()

    def gmacs(self, prune: Tensor, merge: Tensor) -> Tensor:
        """Algorithm 2: the running minimum of the counts, with the straight-through gradient of its maximum."""
        prefix, device = self.backbone.layout.prefix, prune.device
        own = torch.minimum(prune, merge) if self.operator.operation == "prune-merge" else merge
        before = torch.full((1,), float(self.space.tokens - prefix), device=device)
        running = torch.cat([before, own]).cummin(dim=0).values[1:]
        effective = own + (running - own).detach()
        uncompressed_last = self.backbone.layout.depth - 1 - len(self.compressed)
        kept = torch.cat([before, effective, effective[-1:].expand(uncompressed_last)]) + prefix
        return self.space.cost.gmacs(kept.double())

    @torch.no_grad()
    def raw(self) -> Schedule:
        """The counts as the proxies have them, before they are moved onto the budget."""
        layout = self.backbone.layout

        def counts(proxy: DiscreteProxy) -> tuple[int, ...]:
            kept = [layout.tokens] + [int(n) + layout.prefix for n in proxy().count.tolist()]
            return tuple(kept + kept[-1:] * (layout.depth - len(kept)))

        merge = counts(self.merge)
        prune = counts(self.prune) if self.operator.operation == "prune-merge" else merge
        return Schedule(prune, merge, layout.prefix, self.operator)

    def counts(self) -> list[int]:
        return list(self.raw().effective.merge)

    def answer(self) -> Schedule:
        """The learned counts, moved onto the budget: the soft penalty leaves them a few percent off."""
        raw = self.raw().effective
        blocks = len(self.space.least)
        counts = torch.tensor(raw.merge[:blocks], dtype=torch.float64)
        step = torch.where(self.space.free, 1.0, 1e-3).double()
        merge = self.space.every_block(
            rounded(project(counts, self.budget, self.space, step), self.budget, self.space)
        )
        merged = [p - m for p, m in zip(raw.prune, raw.merge, strict=True)]
        before = [self.space.tokens, *merge[:-1]]
        prune = [min(b, m + joined) for b, m, joined in zip(before, merge, merged, strict=True)]
        return Schedule(tuple(prune), merge, raw.prefix, self.operator)

    def state(self) -> dict[str, Any]:
        parameters = (self.prune.logits, self.merge.logits)
        known = [self.optimizer.state[p] for p in parameters if p in self.optimizer.state]
        moments = [{name: value.tolist() for name, value in state.items()} for state in known]
        return {"done": self.done, "logits": [p.tolist() for p in parameters], "moments": moments}

    def restore(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
        parameters = (self.prune.logits, self.merge.logits)
        for parameter, logits in zip(parameters, state["logits"], strict=True):
            parameter.data.copy_(torch.tensor(logits))
        for parameter, moments in zip(parameters, state["moments"], strict=False):
            self.optimizer.state[parameter] = {
                name: torch.tensor(value, device=parameter.device if name != "step" else None)
                for name, value in moments.items()
            }
