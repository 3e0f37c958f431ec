"""Evo-ViT: slow and fast updates of tokens (Xu et al., "Evo-ViT: Slow-Fast Token Evolution for Dynamic Vision
Transformer", 2022).

The model keeps every token, in its place. From a third of the depth on (block 5 of 12) only the tokens of highest
global class attention run through a block: the slow ones. The others, placeholders, are summed up in one
representative token, their mean weighted by that attention, which runs along; each placeholder then moves by what the
representative moved by, in attention and MLP together. Global class attention is a running mean over the blocks, half
of it from the latest one; a placeholder, which did not attend, keeps its own.

There is no selector to train: the model's weights are tuned under the rule. The paper always trains with it; off the
shelf it shows what the rule does to weights that never saw it. In training the mean of the image tokens is
classified too, by the same classifier, and its cross-entropy added (the paper's assisted CLS token loss). Its
layer-to-stage training is not here: every block selects anew throughout.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffrate import ranking
from diffrate.backbones import backbone_of
from diffrate.backbones.base import Backbone
from diffrate.blocks import finish_block
from diffrate.costs.macs import MacCost
from diffrate.errors import DiffRateError
from diffrate.methods.fit import smallest_within
from diffrate.methods.policy import MethodModel
from diffrate.mixing import mix
from diffrate.outputs import main_output
from diffrate.reduction import rank, take
from diffrate.tokens import Tokens
from diffrate.training.objective import Objective

FIRST = 1 / 3  # of the depth: the blocks before run every token
MEMORY = 0.5  # of the global class attention that comes from earlier blocks


class Assisted(NamedTuple):
    """Logits of the model's head, and of the mean image token in its place."""

    logits: Tensor
    assisted: Tensor


class AssistedObjective(Objective):
    def loss(self, output: Any, images: Tensor, labels: Tensor) -> Tensor:
        assisted: Tensor = self.of_labels(output.assisted.float(), labels)
        return super().loss(output, images, labels) + assisted


class EvoViT(MethodModel):
    """slow  how many image tokens run through each block from `first` on."""

    name: ClassVar[str] = "evo-vit"
    objective: ClassVar[type[Objective]] = AssistedObjective

    def __init__(self, original: nn.Module, slow: int) -> None:
        super().__init__(original)
        layout = self.backbone.layout
        if not layout.class_token:
            raise DiffRateError("Evo-ViT selects by class attention, and this model has no class token")
        if layout.restores or type(self.backbone).positions is not Backbone.positions:
            raise DiffRateError(
                "Evo-ViT's representative token has no position, and this model's attention asks for one"
            )
        if not 1 <= slow <= layout.tokens - layout.prefix:
            raise DiffRateError(f"Evo-ViT runs 1 to {layout.tokens - layout.prefix} tokens, not {slow}")
        self.slow, self.first = slow, first_block(layout.depth)

    @classmethod
    def at(cls, model: nn.Module, budget: float) -> EvoViT:
        """As many slow tokens as cost at most `budget` GMACs."""
        backbone = backbone_of(model)
        layout, cost = backbone.layout, MacCost.of_backbone(backbone)
        patches = layout.tokens - layout.prefix

        def slow(t: float) -> int:
            return max(1, math.floor((1 - t) * patches + 1e-9))

        def gmacs(t: float) -> float:
            running = counts(layout.depth, layout.tokens, layout.prefix, slow(t))
            return float(cost.gmacs(running, running))

        return cls(model, slow(smallest_within(gmacs, budget, "Evo-ViT")))

    @property
    def kept(self) -> tuple[int, ...]:
        layout = self.backbone.layout
        return counts(layout.depth, layout.tokens, layout.prefix, self.slow)

    @property
    def attended(self) -> tuple[int, ...]:
        return self.kept  # tokens stand aside before the attention

    def settings(self) -> dict[str, Any]:
        return {"method": self.name, "slow": self.slow, "first_block": self.first, "kept": list(self.kept)}

    def forward(self, images: Tensor, return_tokens: bool = False) -> Any:
        """In training also what the head says of the mean image token."""
        if not self.training or return_tokens:
            return super().forward(images, return_tokens)
        logits, tokens = super().forward(images, return_tokens=True)
        mean = tokens.x[:, tokens.prefix :].mean(dim=1, keepdim=True)
        everywhere = mean.expand(-1, tokens.prefix + 1, -1)  # wherever the head looks
        head = self.backbone.head(tokens.with_features(everywhere))
        return Assisted(main_output(logits), main_output(head))

    def _walk_from(
        self, tokens: Tokens, collect: Collection[int] = (), for_head: bool = False
    ) -> tuple[Tokens, list[Tokens]]:
        self._schedule_for(tokens.count)  # refuses an input of another size
        attention = tokens.x.new_zeros(len(tokens.x), tokens.count - tokens.prefix, dtype=torch.float32)
        collected: list[Tokens] = []
        for i in range(self.backbone.layout.depth):
            if self.grad_checkpointing and torch.is_grad_enabled():
                tokens, attention = checkpoint(self._evolve, i, tokens, attention, use_reentrant=False)
            else:
                tokens, attention = self._evolve(i, tokens, attention)
            if i in collect:
                collected.append(tokens)
        return tokens, collected

    def _evolve(self, i: int, tokens: Tokens, attention: Tensor) -> tuple[Tokens, Tensor]:
        """Block i, and (B, N - prefix) the global class attention after it."""
        prefix = tokens.prefix
        if i < self.first or self.slow >= tokens.count - prefix - 1:
            after, row = self._whole_block(i, tokens)
            return after, row if i == 0 else MEMORY * attention + (1 - MEMORY) * row
        order = rank(attention, prefix)
        slow, fast = order[:, : prefix + self.slow], order[:, prefix + self.slow :]
        placeholders = take(tokens.x, fast)
        weight = attention.gather(1, fast - prefix)
        weight = weight / weight.sum(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        representative = (placeholders * weight.unsqueeze(-1).to(tokens.x.dtype)).sum(dim=1, keepdim=True)
        running = Tokens(torch.cat([take(tokens.x, slow), representative], dim=1), prefix)
        after, row = self._whole_block(i, running)
        moved = placeholders + (after.x[:, -1:] - representative)
        back = order.argsort(dim=1)  # where each token of the old order is in the new one
        x = take(torch.cat([after.x[:, :-1], moved.to(after.x.dtype)], dim=1), back)
        chosen = slow[:, prefix:] - prefix
        seen = MEMORY * attention.gather(1, chosen) + (1 - MEMORY) * row[:, : self.slow]
        return tokens.with_features(x), attention.scatter(1, chosen, seen)

    def _whole_block(self, i: int, tokens: Tokens) -> tuple[Tokens, Tensor]:
        """All of these tokens through block i, and (B, N - prefix) the class token's attention to them."""
        attention = self.backbone.open_attention(i, tokens.x)
        attended = tokens.with_features(
            self.backbone.close_attention(i, tokens.x, mix(attention, attention.logit_bias(None)))
        )
        with torch.no_grad():  # a choice of tokens has no gradient
            row = ranking.class_attention(
                attention.q, attention.k, attention.scale, attention.logit_bias(None), tokens.prefix
            )
        return finish_block(self.backbone, i, attended), row


def first_block(depth: int) -> int:
    return max(1, round(depth * FIRST))


def counts(depth: int, tokens: int, prefix: int, slow: int) -> tuple[int, ...]:
    """Tokens that run through each block, the representative among them."""
    running = min(tokens, prefix + slow + 1)
    return tuple(tokens if i < first_block(depth) else running for i in range(depth))
