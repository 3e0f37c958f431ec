"""The paper's recipe: proxies for prune and merge counts, trained through token masks (paper 4-5, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from diffrate.backbones import Layout, backbone_of
from diffrate.errors import DiffRateError
from diffrate.masking import masked_logits
from diffrate.operator import EXTRAS, Operator
from diffrate.portions import Portions
from diffrate.proxy import DiscreteProxy
from diffrate.schedule import Schedule
from diffrate.searching.budget import LAMBDAS, Budget, Space, project, rounded
from diffrate.searching.replay import Replayed

OPERATOR = Operator()
LEARNING_RATE = (0.01, 0.001)
GRANULARITY = 4
SCALE = 4096.0  # of the loss in the backward pass: in half precision small gradients would vanish


Mix = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def check(operator: Operator, layout: Layout) -> None:
    """Refuse what masks cannot do."""
    if operator.operation == "merge-prune" or operator.choice != "rank":
        raise DiffRateError(
            "the paper's recipe masks tokens by rank: use prune-merge, prune or merge, with choice rank"
        )
    shared = operator.image_share or operator.memory
    if operator.importance not in ("class-attention", "image-attention") or shared:
        raise DiffRateError("the paper's recipe ranks by class attention or by image attention alone")
    if operator.has_extras:
        raise DiffRateError(f"the paper's recipe masks tokens: it does not go with {', '.join(EXTRAS)}")
    if layout.restores and operator.operation != "merge":
        raise DiffRateError(
            "the paper's recipe searches a model that restores its grid with merging only: use operation merge"
        )
    if layout.mean_pooled and not layout.plain_mean:
        raise DiffRateError(
            "the paper's recipe masks tokens, which this model's pooling head cannot do; use fast"
        )


class PaperRecipe:
    """One budget's search, as published: uniform start, cross-entropy, AdamW with a cosine, here per step."""

    returns_last: ClassVar[bool] = True  # what the proxies have learned at the end is the answer

    def __init__(
        self,
        model: nn.Module,
        space: Space,
        operator: Operator,
        budget: Budget | float,
        steps: int,
        reduce: Callable[[Tensor], Tensor],
        mix: Mix | None = None,
        lambdas: Mapping[str, float] = LAMBDAS,
    ) -> None:
        self.model, self.space, self.operator = model, space, operator
        self.backbone = backbone_of(model)
        layout = self.backbone.layout
        check(operator, layout)
        self.budget, self.lambdas = Budget.of(budget), lambdas
        self.steps, self.reduce, self.mix, self.done = steps, reduce, mix, 0
        self.compressed = list(range(1, layout.depth if layout.compresses_last_block else layout.depth - 1))
        device = next(model.parameters()).device
        patches = layout.tokens - layout.prefix
        self.prune = DiscreteProxy(len(self.compressed), patches, GRANULARITY).to(device)
        self.merge = DiscreteProxy(len(self.compressed), patches, GRANULARITY).to(device)
        self.parameters = [self.prune.logits, self.merge.logits]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE[0], weight_decay=0.0)
        self.gradients = Replayed(self._gradients)
        self.portions = Portions("the search")

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """One step of Algorithm 1; the loss stays on the device."""
        for module in self.model.modules():
            if isinstance(module, DropPath):
                module.train()
        if self.mix is not None:
            even = len(images) // 2 * 2  # images are mixed in pairs
            images, labels = self.mix(images[:even], labels[:even])
        first, last = LEARNING_RATE
        progress = self.done / max(self.steps - 1, 1)
        rate = last + (first - last) * 0.5 * (1 + math.cos(math.pi * progress))
        self.optimizer.param_groups[0]["lr"] = rate
        task, *gradients = self.portions.fitted(lambda parts: self._mean(images, labels, parts), len(images))
        with torch.enable_grad():
            over = self.budget.loss(self.price(self.prune().count, self.merge().count), self.lambdas)
            penalties = self._grad(over)
        for parameter, gradient, penalty in zip(self.parameters, gradients, penalties, strict=True):
            # Each process has its share of the batch: the sum of shares is the gradient of the whole.
            share = torch.cat([gradient.flatten() * len(images), gradient.new_tensor([len(images)])])
            total = self.reduce(share)
            parameter.grad = (total[:-1] / total[-1]).view_as(parameter) + penalty
        self.optimizer.step()
        self.done += 1
        return task

    def _mean(self, images: Tensor, labels: Tensor, parts: list[slice]) -> list[Tensor]:
        """Loss and gradients of a batch that runs in parts."""
        if len(parts) == 1:
            return list(self.gradients(images, labels))
        found = [[value * len(images[p]) for value in self.gradients(images[p], labels[p])] for p in parts]
        return [torch.stack(values).sum(dim=0) / len(images) for values in zip(*found, strict=True)]

    def _gradients(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """The task's loss, and its gradients for both proxies."""
        with torch.enable_grad():
            prune, merge = self.prune(), self.merge()
            logits = masked_logits(self.backbone, images, prune, merge, self.compressed, self.operator)
            task = F.cross_entropy(logits.float(), labels)
            return task.detach(), *(gradient / SCALE for gradient in self._grad(SCALE * task))

    def _grad(self, loss: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, found, strict=True)]

    def price(self, prune: Tensor, merge: Tensor) -> dict[str, Tensor]:
        """Algorithm 2: the running minimum of the counts; through it every count gets the gradient of its block."""
        prefix, device = self.backbone.layout.prefix, prune.device
        own = merge
        if self.operator.operation == "prune-merge":
            both = prune + merge
            own = torch.minimum(prune, merge).detach() + (both - both.detach())
        before = torch.full((1,), float(self.space.tokens - prefix), device=device)
        running = torch.cat([before, own]).cummin(dim=0).values[1:]
        effective = own + (running - own).detach()
        uncompressed_last = self.backbone.layout.depth - 1 - len(self.compressed)
        kept = torch.cat([before, effective, effective[-1:].expand(uncompressed_last)]) + prefix
        return self.space.cost.price(kept.double())

    @torch.no_grad()
    def present(self) -> Schedule:
        """The counts as the proxies have them, before they are moved onto the budget."""
        layout = self.backbone.layout

        def counts(proxy: DiscreteProxy) -> tuple[int, ...]:
            kept = [layout.tokens] + [int(n) + layout.prefix for n in proxy().count.tolist()]
            return tuple(kept + kept[-1:] * (layout.depth - len(kept)))

        merge = counts(self.merge)
        prune = counts(self.prune) if self.operator.operation == "prune-merge" else merge
        return Schedule(prune, merge, layout.prefix, self.operator)

    def answer(self) -> Schedule:
        """The learned counts, moved onto the budget, which the soft penalty leaves a few percent off.

        In the last block of a class-token model only the prefix stays, as in every search here: what the proxy learned
        there goes to the other blocks.
        """
        raw = self.present().effective
        on = project(self.space.searched(raw), self.budget, self.space, self.space.freely())
        merge = self.space.every_block(rounded(on, self.budget, self.space))
        merged = [p - m for p, m in zip(raw.prune, raw.merge, strict=True)]
        before = [self.space.tokens, *merge[:-1]]
        prune = [min(b, m + joined) for b, m, joined in zip(before, merge, merged, strict=True)]
        return Schedule(tuple(prune), merge, raw.prefix, self.operator)

    def state(self) -> dict[str, Any]:
        known = [self.optimizer.state[p] for p in self.parameters if p in self.optimizer.state]
        moments = [{name: value.tolist() for name, value in state.items()} for state in known]
        return {"done": self.done, "logits": [p.tolist() for p in self.parameters], "moments": moments}

    def restore(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
        for parameter, logits in zip(self.parameters, state["logits"], strict=True):
            parameter.data.copy_(torch.tensor(logits))
        for parameter, moments in zip(self.parameters, state["moments"], strict=False):
            self.optimizer.state[parameter] = {
                name: torch.tensor(value, device=parameter.device if name != "step" else None)
                for name, value in moments.items()
            }


def check_labels(labels: Tensor, classes: int) -> None:
    """Refuse labels that the classifier does not have; on the host, before the batch leaves it."""
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= classes:
        found = "none" if lowest < 0 else f"a label {highest}"
        raise DiffRateError(
            f"the paper's recipe learns from labels from 0 to {classes - 1}, and these images have {found}"
        )
