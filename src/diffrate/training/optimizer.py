"""timm's optimiser and its schedule, as a recipe asks for them."""

from __future__ import annotations

from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import nn

from diffrate.compressed import CompressedModel
from diffrate.errors import DiffRateError
from diffrate.models import first_line
from diffrate.training.recipe import Recipe

NEW_PARTS_LR = 1e-3  # peak learning rate of what a method adds to a model, as DynamicViT's predictors have it


def build_optimizer(model: nn.Module, recipe: Recipe, steps: int, device: torch.device) -> tuple[Any, Any]:
    """timm's optimiser and cosine for the model's own parameters; a compressed model shares them."""
    whole = model.original if isinstance(model, CompressedModel) else model
    fused: dict[str, Any] = {"fused": True} if recipe.opt == "adamw" and device.type == "cuda" else {}
    try:
        optimizer = create_optimizer_v2(
            whole,
            recipe.opt,
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            layer_decay=recipe.layer_decay if recipe.layer_decay < 1 else None,
            **fused,
        )
    except (ValueError, AssertionError, AttributeError) as error:
        raise DiffRateError(f"timm cannot make the optimiser {recipe.opt}: {first_line(error)}") from error
    if model is not whole:
        _add_new_parts(optimizer, model, recipe)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        num_epochs=recipe.epochs,
        warmup_epochs=min(recipe.warmup_epochs, recipe.epochs // 2),
        warmup_lr=recipe.warmup_lr,
        min_lr=recipe.min_lr,
        step_on_epochs=False,
        updates_per_epoch=steps,
    )
    scheduler.step_update(0)
    return optimizer, scheduler


def _add_new_parts(optimizer: Any, model: nn.Module, recipe: Recipe) -> None:
    """What a method adds to a model starts from nothing, so it learns faster than the tuned weights."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    new = [p for p in model.parameters() if id(p) not in known and p.requires_grad]
    if new:
        optimizer.add_param_group({"params": new, "lr_scale": max(1.0, NEW_PARTS_LR / recipe.lr)})
