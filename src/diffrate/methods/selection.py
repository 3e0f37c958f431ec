"""What methods share whose selectors are trained: a module at each of a few stages that scores the image tokens.

In training no token is dropped. Each selector draws a 0/1 mask by Gumbel-softmax, straight-through; a token masked once
stays masked, and nobody but itself attends to it (DynamicViT's eq. 10-12; the same attention as the search's). The loss
is DynamicViT's: cross-entropy, answers and last features of the model as it came, and the share of tokens that each
stage leaves, of every image in DynamicViT and on average over a batch in SPViT. At inference tokens are really dropped:
a stage keeps a fixed number, those with the highest scores.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffrate.backbones import Layout, backbone_of
from diffrate.backbones.base import Backbone
from diffrate.compressed import compress
from diffrate.costs.macs import GIGA, MacCost
from diffrate.errors import DiffRateError
from diffrate.masking import MaskedAttention
from diffrate.methods.evit import stages_of
from diffrate.methods.fit import smallest_within
from diffrate.methods.policy import MethodModel
from diffrate.outputs import main_output
from diffrate.ranking import per_logit
from diffrate.reduction import keep_first, rank
from diffrate.schedule import Schedule
from diffrate.tokens import Tokens
from diffrate.training.objective import Objective, divergence
from diffrate.training.recipe import Recipe

KL, FEATURES, RATIO = 0.5, 0.5, 2.0  # weights beside the cross-entropy, of both papers


class Selector(nn.Module):
    """Scores tokens; `macs` is what one token costs it."""

    macs: float

    @abstractmethod
    def forward(self, x: Tensor, alive: Tensor) -> Tensor:
        """(B, N, 2) log-probabilities that each of x (B, N, C) stays, and goes; alive (B, N): who is still there."""


class Trial(NamedTuple):
    """What a model with selectors returns in training.

    tokens  (B, P, C) the tokens of the input patches after the last norm; alive (B, P) whether they are left.
    shares  (B, S) of the image tokens that each stage left.
    """

    logits: Tensor
    tokens: Tensor
    alive: Tensor
    shares: Tensor


class SelectionObjective(Objective):
    """The loss of both papers; the teacher is the model as it came."""

    needs_teacher: ClassVar[bool] = True

    def __init__(self, model: nn.Module, recipe: Recipe, teacher: nn.Module | None = None) -> None:
        if recipe.distillation:
            raise DiffRateError("a method with selectors distils by its own weights: leave distillation at 0")
        if teacher is None:
            raise DiffRateError("selectors learn from the uncompressed model: they need a teacher")
        super().__init__(model, recipe, teacher)
        assert isinstance(model, SelectingModel)
        self.wanted, self.by_image = model.shares, model.ratio_by_image
        self.whole = compress(teacher)

    def loss(self, output: Any, images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            answers, tokens = self.whole(images, return_tokens=True)
        logits = output.logits.float()
        loss: Tensor = self.of_labels(logits, labels)
        loss = loss + KL * divergence(logits, main_output(answers).float(), self.recipe.temperature)
        loss = loss + FEATURES * feature_loss(output, tokens.x[:, tokens.prefix :])
        return loss + RATIO * ratio_loss(output.shares, self.wanted, self.by_image)


def feature_loss(trial: Trial, features: Tensor) -> Tensor:
    """Squared distance to the whole model's tokens, over those that are left; the mean over channels."""
    distance = (trial.tokens.float() - features.float()).square().mean(dim=-1)
    return (distance * trial.alive).sum() / trial.alive.sum().clamp_min(1)


def ratio_loss(shares: Tensor, wanted: tuple[float, ...], by_image: bool = True) -> Tensor:
    """Squared distance of the shares (B, S) that stages leave to what they should: of every image, or of their mean."""
    left = shares if by_image else shares.mean(dim=0)
    return (left - torch.tensor(wanted, device=shares.device)).square().mean()


class SelectingModel(MethodModel):
    """A model with trained selectors.

    keep_rate  share of the image tokens that the first stage keeps; stage s keeps keep_rate ** s of them.
    stages     the blocks before which tokens go.
    adds       tokens that a stage makes out of what it drops.
    ratio_by_image  whether the share that a stage leaves is asked of every image, or of a batch on average.
    """

    name: ClassVar[str]
    adds: ClassVar[int] = 0
    ratio_by_image: ClassVar[bool] = True
    objective: ClassVar[type[Objective]] = SelectionObjective

    def __init__(self, original: nn.Module, keep_rate: float) -> None:
        super().__init__(original)
        layout = self.backbone.layout
        if layout.restores:
            raise DiffRateError(f"{self.name} drops tokens for good, and this model needs its whole grid")
        if layout.mean_pooled and not layout.plain_mean:
            raise DiffRateError(f"{self.name} learns by masks, which this model's pooling head does not take")
        if not 0 < keep_rate <= 1:
            raise DiffRateError(f"the keep rate of {self.name} goes from 0 to 1, not {keep_rate:g}")
        self.keep_rate, self.stages = keep_rate, stages_of(layout)
        self.shares = tuple(keep_rate ** (s + 1) for s in range(len(self.stages)))
        self.numbers, self._kept = counts(layout, self.stages, keep_rate, self.adds)
        self.selectors = nn.ModuleList(self.new_selector(self.backbone) for _ in self.stages)
        self.selectors.to(next(original.parameters()).device).train(original.training)

    @classmethod
    def at(cls, model: nn.Module, budget: float) -> SelectingModel:
        """The highest keep rate that costs at most `budget` GMACs, selectors included; they are not trained yet."""
        backbone = backbone_of(model)
        cost, stages = MacCost.of_backbone(backbone), stages_of(backbone.layout)
        with torch.device("meta"):
            macs = cls.new_selector(backbone).macs

        def gmacs(t: float) -> float:
            _, kept = counts(backbone.layout, stages, max(1 - t, 1e-6), cls.adds)
            return float(cost.gmacs(kept, kept)) + scored(backbone.layout, stages, kept) * macs / GIGA

        return cls(model, max(1 - smallest_within(gmacs, budget, cls.name), 1e-6))

    @classmethod
    @abstractmethod
    def new_selector(cls, backbone: Backbone) -> Selector:
        """A selector for tokens of this model, untrained."""

    # --- what it costs --------------------------------------------------------------------------------------------

    @property
    def kept(self) -> tuple[int, ...]:
        return self._kept

    @property
    def attended(self) -> tuple[int, ...]:
        return self._kept  # tokens go before the attention

    @property
    def added_gmacs(self) -> float:
        return scored(self.backbone.layout, self.stages, self._kept) * self._selector(0).macs / GIGA

    def settings(self) -> dict[str, Any]:
        return {"method": self.name, "keep_rate": self.keep_rate, "stages": list(self.stages),
                "kept": list(self.kept)}  # fmt: skip

    # --- inference: tokens are dropped ----------------------------------------------------------------------------

    def _run_block(self, i: int, tokens: Tokens, schedule: Schedule) -> Tokens:
        if i in self.stages:
            tokens = self._select(self.stages.index(i), tokens)
        return super()._run_block(i, tokens, schedule)

    def _select(self, stage: int, tokens: Tokens) -> Tokens:
        images = tokens.x[:, tokens.prefix :]
        if self.numbers[stage] >= images.shape[1]:
            return tokens
        score = self._selector(stage)(images, images.new_ones(images.shape[:2]))[..., 0]
        return self.drop(tokens, score, self.numbers[stage])

    def drop(self, tokens: Tokens, score: Tensor, keep: int) -> Tokens:
        """The prefix and the `keep` image tokens of the highest scores (B, N - prefix)."""
        return keep_first(tokens, None, rank(score, tokens.prefix), tokens.prefix + keep)[0]

    def _selector(self, stage: int) -> Selector:
        selector = self.selectors[stage]
        assert isinstance(selector, Selector)
        return selector

    # --- training: tokens are masked ------------------------------------------------------------------------------

    def forward(self, images: Tensor, return_tokens: bool = False) -> Any:
        """In training a Trial: masks, not lengths, carry the gradient."""
        if self.training and not return_tokens:
            return self.trial(images)
        return super().forward(images, return_tokens)

    def trial(self, images: Tensor) -> Trial:
        backbone, prefix = self.backbone, self.backbone.layout.prefix
        first = backbone.start(images)
        x, patches = first.x, first.count - prefix
        alive = torch.ones(x.shape[:2], dtype=torch.float32, device=x.device)
        shares: list[Tensor] = []
        for i in range(backbone.layout.depth):
            if i in self.stages:
                log_probability = self._selector(len(shares))(x[:, prefix:], alive[:, prefix:])
                left = alive[:, prefix:] * self.draw(len(shares), log_probability, alive[:, prefix:])
                shares.append(left.sum(dim=1) / patches)
                x, alive = self.mask(x, alive, left, log_probability[..., 0])
            attention = backbone.open_attention(i, x, first.positions)
            q, k, v, scale = attention[:4]
            if shares:
                none = torch.zeros_like(alive)
                bias = none if attention.bias is None else attention.bias + per_logit(none)
                mixed = MaskedAttention.apply(q, k, v, bias, alive, scale)
            else:
                mixed = F.scaled_dot_product_attention(q, k, v, attention.bias, scale=scale)
            x = backbone.mlp(i, backbone.close_attention(i, x, mixed))
        x = backbone.norm(x)
        logits = main_output(backbone.head(Tokens(x, prefix, alive)))
        end = prefix + patches
        return Trial(logits, x[:, prefix:end], alive[:, prefix:end], torch.stack(shares, dim=1))

    def draw(self, stage: int, log_probability: Tensor, alive: Tensor) -> Tensor:
        """(B, N) 1 for what stays and 0 for what goes, drawn; the gradient is that of the soft draw."""
        return F.gumbel_softmax(log_probability.float(), tau=1.0, hard=True)[..., 0]

    def mask(self, x: Tensor, alive: Tensor, left: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and mask once a stage has left `left` (B, N - prefix) of the image tokens."""
        prefix = self.backbone.layout.prefix
        return x, torch.cat([alive[:, :prefix], left], dim=1)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        if enable:
            raise DiffRateError(f"{self.name} trains without gradient checkpointing")


def counts(
    layout: Layout, stages: tuple[int, ...], keep_rate: float, adds: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Image tokens that each stage keeps, and tokens in each block; a stage that would save nothing keeps all."""
    patches = now = layout.tokens - layout.prefix
    numbers: list[int] = []
    kept: list[int] = []
    for i in range(layout.depth):
        if i in stages:
            # The tolerance keeps 0.7 x 10, which is 6.999…, from becoming 6.
            wanted = max(1, math.floor(keep_rate ** (len(numbers) + 1) * patches + 1e-9))
            numbers.append(wanted if wanted + adds < now else now)
            now = min(now, wanted + adds)
        kept.append(layout.prefix + now)
    return tuple(numbers), tuple(kept)


def scored(layout: Layout, stages: tuple[int, ...], kept: tuple[int, ...]) -> int:
    """Image tokens that the selectors look at, all stages together."""
    return sum(kept[i - 1] - layout.prefix for i in stages)


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers of these widths with GELU between them."""
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise(widths):
        layers += [nn.Linear(width, following), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def local_and_global(x: Tensor, alive: Tensor) -> Tensor:
    """Each token's first half of features, and beside it the mean of the second half over the live tokens.

    x (B, N, …, C), alive (B, N).
    """
    own, shared = x.chunk(2, dim=-1)
    weight = (alive / alive.sum(dim=1, keepdim=True).clamp_min(1)).to(x.dtype)
    mean = (shared * weight.view(*weight.shape, *[1] * (x.dim() - 2))).sum(dim=1, keepdim=True)
    return torch.cat([own, mean.expand_as(shared)], dim=-1)
