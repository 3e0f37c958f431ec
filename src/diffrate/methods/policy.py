"""The seam for other methods: a policy says what leaves each block, the walk around it stays the same.

A model under a policy embeds, attends, classifies and traces as one under a schedule; only the step between attention
and MLP is the method's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from diffrate.backbones import backbone_of
from diffrate.backbones.base import Attention
from diffrate.blocks import finish_block, run_block
from diffrate.compressed import CompressedModel
from diffrate.costs.macs import MacCost
from diffrate.mixing import mix
from diffrate.operator import Operator
from diffrate.schedule import Schedule
from diffrate.tokens import Tokens
from diffrate.training.objective import Objective


class Policy(ABC):
    """What a method does in the blocks of a model.

    name          of the method, as `diffrate methods` lists it.
    proportional  whether log(size) is added to the attention logits.
    by_image      whether how many tokens go depends on the image.
    kept          tokens that leave each block; for a method that decides image by image, the most.
    """

    name: ClassVar[str]
    proportional: ClassVar[bool] = False
    by_image: ClassVar[bool] = False
    kept: tuple[int, ...]

    @abstractmethod
    def removes(self, i: int) -> bool:
        """Whether block i may remove tokens."""

    @abstractmethod
    def reduce(self, i: int, attention: Attention, bias: Tensor | None, attended: Tokens) -> Tokens:
        """The tokens of block i between attention and MLP, from those that attended.

        bias  what was added to the logits: (B, N) of keys, or (B or 1, heads, N, N) of pairs.
        """

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The method's own parameters, as a results file should have them."""


class MethodModel(CompressedModel):
    """A model under a method's rule in place of a schedule: same call, same outputs, weights shared."""

    objective: ClassVar[type[Objective]] = Objective  # what `finetune` minimises

    def __init__(self, original: nn.Module) -> None:
        layout = backbone_of(original).layout
        super().__init__(original, Schedule.identity(layout.depth, layout.tokens, layout.prefix), Operator())
        self.exactly = False

    def _removes_nothing(self, tokens: int) -> bool:
        return False

    def extra_repr(self) -> str:
        return str(self.settings())


class PolicyModel(MethodModel):
    """A model under a policy."""

    def __init__(self, original: nn.Module, policy: Policy) -> None:
        super().__init__(original)
        self.policy = policy

    @property
    def kept(self) -> tuple[int, ...]:
        return self.policy.kept

    def image_counts(self, images: Tensor) -> Tensor:
        """(B, L) tokens of each image after each block: what it would cost alone, without padding."""
        _, collected = self._walk(images, track=False, collect=range(self.backbone.layout.depth))
        counts = images.new_zeros(len(images), len(collected))
        for i, tokens in enumerate(collected):
            counts[:, i] = tokens.count if tokens.size is None else (tokens.size > 0).sum(dim=1)
        return counts

    def image_gmacs(self, images: Tensor) -> Tensor:
        """(B,) GMACs of each image alone."""
        return self.gmacs_of_counts(self.image_counts(images))

    def gmacs_of_counts(self, counts: Tensor) -> Tensor:
        """(B,) GMACs for so many tokens after each block (B, L)."""
        return MacCost.of_backbone(self.backbone).gmacs(counts.double().cpu())

    def _run_block(self, i: int, tokens: Tokens, schedule: Schedule) -> Tokens:
        backbone, policy = self.backbone, self.policy
        weighed = tokens.key_bias() if policy.proportional else None
        if weighed is None and not policy.removes(i) and backbone.runs_whole(tokens.positions):
            return run_block(backbone, i, tokens, tokens.count, tokens.count, self.operator)
        attention = backbone.open_attention(i, tokens.x, tokens.positions)
        bias = attention.logit_bias(weighed)
        attended = tokens.with_features(backbone.close_attention(i, tokens.x, mix(attention, bias)))
        if policy.removes(i):
            attended = policy.reduce(i, attention, bias, attended)
        return finish_block(backbone, i, attended)

    def settings(self) -> dict[str, Any]:
        return {"method": self.policy.name, **self.policy.settings(), "kept": list(self.kept)}
