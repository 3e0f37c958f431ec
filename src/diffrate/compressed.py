"""The walk: embed, then (attend, rank, prune, merge, MLP) block by block, then the head. And the way back.

`compress` wraps a model without touching it: the weights are shared, nothing is patched, and `.original` is the model
as it came. All that changes from block to block travels in one Tokens object.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffrate import kernels
from diffrate.backbones import Layout, backbone_of
from diffrate.backbones.timm_metaformer import TimmMetaFormer
from diffrate.blocks import run_block, run_block_for_prefix
from diffrate.hub import HubModel
from diffrate.operator import Operator
from diffrate.outputs import class_count
from diffrate.reduction import restore
from diffrate.schedule import Schedule, ScheduleError
from diffrate.steps import step
from diffrate.tokens import Tokens


def compress(
    model: nn.Module,
    schedule: Schedule | None = None,
    *,
    importance: str | None = None,
    operation: str | None = None,
    proportional: bool | None = None,
    mean: str | None = None,
    choice: str | None = None,
    floor: float | None = None,
    image_share: float | None = None,
    memory: float | None = None,
    pruned_mass: bool | None = None,
    size_aware: bool | None = None,
    keep_norm: bool | None = None,
    seed: int | None = None,
) -> CompressedModel:
    """A drop-in faster model: same call, same outputs, weights shared with `model`, which is left as it is.

    schedule  how many tokens each block keeps; None removes nothing.
    The other arguments change the operator that the schedule records (see diffrate.Operator).
    """
    if isinstance(model, CompressedModel):
        model = model.original
    backbone = backbone_of(model)
    layout = backbone.layout
    if schedule is None:
        schedule = Schedule.identity(layout.depth, layout.tokens, layout.prefix)
    operator = schedule.operator.changed(
        importance=importance,
        operation=operation,
        proportional=proportional,
        mean=mean,
        choice=choice,
        floor=floor,
        image_share=image_share,
        memory=memory,
        pruned_mass=pruned_mass,
        size_aware=size_aware,
        keep_norm=keep_norm,
        seed=seed,
    )
    if backbone.library == "transformers":
        from diffrate.hf import CompressedTower

        return CompressedTower(model, schedule, operator)
    return CompressedModel(model, schedule, operator)


def with_kernels(model: nn.Module, operator: Operator | None = None) -> CompressedModel:
    """The whole model, every token kept in every block, with the kernels that compressed ones have on a GPU.

    Its answers are the model's own to within rounding. What a schedule is worth shows against its time.
    """
    layout = backbone_of(model).layout
    whole = Schedule.identity(layout.depth, layout.tokens, layout.prefix)
    made = compress(model, replace(whole, operator=operator or whole.operator))
    made.exactly = False
    return made


class CompressedModel(nn.Module, HubModel):
    """A model that runs under a schedule. Its state_dict has the original's keys, so checkpoints are ordinary ones."""

    def __init__(self, original: nn.Module, schedule: Schedule, operator: Operator) -> None:
        super().__init__()
        self.original = original
        self.backbone = backbone_of(original)
        self.operator = checked_operator(operator, self.backbone.layout)
        self.schedule = checked(schedule, self.backbone.layout)
        self.effective = self.schedule.effective  # once: a compiler need not look into it
        # Where nothing is removed the answers are the original's to the bit.
        self.exactly = self.schedule.removes_nothing
        self.grad_checkpointing = False
        self.training = original.training  # train() would also reset layers that are in a mode of their own
        self.register_load_state_dict_pre_hook(_to_inner_keys)
        self.register_state_dict_post_hook(_to_original_keys)

    # --- what a timm model offers ---------------------------------------------------------------------------------

    def forward(self, images: Tensor, return_tokens: bool = False) -> Any:
        """Logits; with return_tokens also the final Tokens: features, sizes and the patch map."""
        walked, _ = self._walk(images, track=return_tokens, for_head=not return_tokens)
        tokens = walked.with_features(self.backbone.norm(walked.x))
        with step("head"):
            logits = self.backbone.head(tokens)
        return (logits, tokens) if return_tokens else logits

    def forward_features(self, images: Tensor) -> Tensor:
        """(B, N', C) tokens after the last norm."""
        tokens = self.forward_tokens(images)
        features = self.backbone.features(tokens)
        if self.backbone.layout.mean_pooled and not torch.compiler.is_compiling():
            features.token_size = tokens.size  # type: ignore[attr-defined]  # forward_head weighs by it
        return features

    def forward_head(self, features: Tensor, pre_logits: bool = False, size: Tensor | None = None) -> Any:
        """Pool and classify what forward_features returned.

        Heads that average tokens need their sizes: they come with the tensor that forward_features returns, or as
        `size` (from forward_tokens) where that tensor was transformed in between.
        """
        layout = self.backbone.layout
        if isinstance(self.backbone, TimmMetaFormer):
            return self.backbone.classify(features, pre_logits)
        known = size is not None or hasattr(features, "token_size")  # None there: every token counts once
        size = getattr(features, "token_size", None) if size is None else size
        if not known and layout.mean_pooled and not self._removes_nothing(features.shape[1]):
            raise ScheduleError(
                "this head averages tokens and needs their sizes: pass forward_head(tokens.x, size=tokens.size) "
                "with tokens = forward_tokens(images)"
            )
        return self.backbone.head(Tokens(features, layout.prefix, size), pre_logits=pre_logits)

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """timm's interface to inner features: grids are restored, so shapes are those of the original model."""
        if isinstance(self.backbone, TimmMetaFormer):
            return self._stage_maps(self.backbone, images, indices, intermediates_only)
        chosen, _ = feature_take_indices(
            self.backbone.layout.depth, indices if isinstance(indices, int | None) else list(indices)
        )
        final, collected = self._walk(images, track=True, collect=set(chosen))
        rows, columns = self.backbone.grid(images)
        intermediates: list[Any] = []
        for tokens in collected:
            assert tokens.patches is not None
            x = self.backbone.norm(tokens.x) if norm else tokens.x
            grid = restore(x, tokens.patches)
            if output_fmt == "NCHW":
                grid = grid.transpose(1, 2).unflatten(2, (rows, columns)).contiguous()
            prefix = x[:, : tokens.prefix]
            intermediates.append((grid, prefix) if return_prefix_tokens and tokens.prefix else grid)
        return intermediates if intermediates_only else (self.backbone.norm(final.x), intermediates)

    def _stage_maps(
        self,
        backbone: TimmMetaFormer,
        images: Tensor,
        indices: int | Sequence[int] | None,
        intermediates_only: bool,
    ) -> Any:
        """The feature map of each chosen stage, the compressed one restored."""
        stages = len(backbone.model.stages)
        chosen, _ = feature_take_indices(
            stages, indices if isinstance(indices, int | None) else list(indices)
        )
        early = backbone.early(images)
        tokens, _ = self._walk_from(backbone.start_with(backbone.embed_map(early[-1]), images))
        restored = backbone.restored(tokens)
        maps = [*early[: backbone.index], restored, *backbone.late(restored)]
        taken = [maps[i] for i in chosen]
        return taken if intermediates_only else (maps[-1], taken)

    def get_intermediate_layers(
        self,
        images: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> Any:
        """DINO's interface to inner features, as in timm."""
        return self.forward_intermediates(
            images,
            n,
            return_prefix_tokens=return_prefix_tokens,
            norm=norm,
            output_fmt="NCHW" if reshape else "NLC",
            intermediates_only=True,
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Training: compute each block again on the way back instead of keeping its activations."""
        self.grad_checkpointing = enable

    @property
    def pretrained_cfg(self) -> Any:
        return getattr(self.original, "pretrained_cfg", {})

    @property
    def default_cfg(self) -> Any:
        return self.pretrained_cfg

    @property
    def num_classes(self) -> int:
        return class_count(self.original)

    @property
    def num_features(self) -> int:
        return int(self.original.num_features)  # type: ignore[arg-type]

    # --- what a compressed model adds -----------------------------------------------------------------------------

    @property
    def kept(self) -> tuple[int, ...]:
        """Tokens that each block hands to its MLP, at the model's own input size."""
        return self.schedule.effective.merge

    @property
    def attended(self) -> tuple[int, ...]:
        """Tokens in each block's attention: what the block before handed on."""
        return (self.backbone.layout.tokens, *self.kept[:-1])

    @property
    def added_gmacs(self) -> float:
        """GMACs of parts that the original does not have."""
        return 0.0

    def settings(self) -> dict[str, Any]:
        """What makes this model of the original, as a results file should have it."""
        return {"schedule": self.schedule.to_dict(), "operator": dict(vars(self.operator))}

    def forward_tokens(self, images: Tensor, patches: bool = False) -> Tokens:
        """The tokens after the last norm, with their sizes and, on request, the map from patch to token."""
        tokens, _ = self._walk(images, track=patches)
        return tokens.with_features(self.backbone.norm(tokens.x))

    def trace(self, images: Tensor) -> list[Tokens]:
        """The tokens as they leave each block, with patch maps: which patch went where, block by block."""
        return self._walk(images, track=True, collect=range(self.backbone.layout.depth))[1]

    def _walk(
        self, images: Tensor, track: bool, collect: Collection[int] = (), for_head: bool = False
    ) -> tuple[Tokens, list[Tokens]]:
        """The tokens after the last block, and after those of `collect`; `for_head`: only what the head looks at."""
        return self._walk_from(self._start(images, track), collect, for_head)

    def _start(self, images: Tensor, track: bool = False) -> Tokens:
        """The tokens that enter the first block."""
        with step("embedding"), nullcontext() if self.exactly else kernels.embedding(images):
            return self.backbone.start(images, track)

    def _walk_from(
        self, tokens: Tokens, collect: Collection[int] = (), for_head: bool = False
    ) -> tuple[Tokens, list[Tokens]]:
        schedule = self._schedule_for(tokens.count)
        collected: list[Tokens] = []
        for i in range(schedule.depth):
            last = i == schedule.depth - 1 and schedule.merge[i] < tokens.count
            if for_head and last and self.backbone.layout.compresses_last_block:
                return run_block_for_prefix(self.backbone, i, tokens, self.operator), collected
            if self.grad_checkpointing and torch.is_grad_enabled():
                tokens = checkpoint(self._run_block, i, tokens, schedule, use_reentrant=False)
            else:
                tokens = self._run_block(i, tokens, schedule)
            if i in collect:
                collected.append(tokens)
        return tokens, collected

    def _run_block(self, i: int, tokens: Tokens, schedule: Schedule) -> Tokens:
        """One block under the effective schedule; methods that remove tokens by other rules put theirs here."""
        counts = schedule.prune[i], schedule.merge[i]
        return run_block(self.backbone, i, tokens, *counts, self.operator, self.exactly)

    def _schedule_for(self, tokens: int) -> Schedule:
        """The effective schedule for this input, in proportion where a dynamic model gets another image size."""
        if tokens != self.schedule.tokens and not self.backbone.layout.dynamic:
            raise ScheduleError(
                f"the schedule is for {self.schedule.tokens} tokens and this input gives {tokens}"
            )
        return self.effective if tokens == self.schedule.tokens else self.schedule.resized(tokens).effective

    def _removes_nothing(self, tokens: int) -> bool:
        return self.schedule.removes_nothing or tokens == self.schedule.tokens

    def extra_repr(self) -> str:
        kept = " ".join(map(str, self.schedule.effective.merge))
        return f"kept tokens: {kept}\noperator: {self.operator}"


def checked(schedule: Schedule, layout: Layout) -> Schedule:
    """The schedule, if it fits the model; a ScheduleError that says what does not."""
    if schedule.depth != layout.depth:
        raise ScheduleError(f"the schedule has {schedule.depth} blocks and the model has {layout.depth}")
    if schedule.tokens != layout.tokens:
        raise ScheduleError(
            f"the schedule starts from {schedule.tokens} tokens and the model has {layout.tokens} at "
            f"{layout.img_size[0]}x{layout.img_size[1]} pixels; schedule.resized({layout.tokens}) keeps its proportions"
        )
    running = schedule.effective
    if min(running.merge) < max(layout.prefix, 1):
        raise ScheduleError(
            f"the schedule keeps as few as {min(running.merge)} tokens, but the model's {layout.prefix} prefix tokens "
            "are never removed"
        )
    if layout.mean_pooled and min(running.merge) == layout.prefix:
        raise ScheduleError("the schedule leaves no image token, and this model's head looks at image tokens")
    # The model knows its prefix; a schedule that is resized for another input must keep all of it.
    return schedule if schedule.prefix == layout.prefix else replace(schedule, prefix=layout.prefix)


def checked_operator(operator: Operator, layout: Layout) -> Operator:
    """The operator with "auto" resolved for this model."""
    if operator.importance == "auto":
        if layout.class_token:
            return operator.changed(importance="class-attention")
        return operator.changed(importance="image-attention")
    if operator.importance.startswith("class-") and not layout.class_token:
        raise ScheduleError(
            f"importance {operator.importance!r} needs a class token, which this model does not have; "
            "use image-attention"
        )
    return operator


def _to_original_keys(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """state_dict hook: drop the `original.` level, so that the keys are those of the wrapped model."""
    inner = prefix + "original."
    for key in [key for key in state if key.startswith(inner)]:
        state[prefix + key.removeprefix(inner)] = state.pop(key)


def _to_inner_keys(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """load_state_dict hook: the inverse of _to_original_keys; parts that a method adds keep their names."""
    inner = prefix + "original."
    own = tuple(f"{prefix}{name}." for name, _ in module.named_children())
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(own)]:
        state[inner + key.removeprefix(prefix)] = state.pop(key)
