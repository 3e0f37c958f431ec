"""The recipes with a name have the numbers of their papers, and a command without flags trains by them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm.data.auto_augment as augmentations
import torch
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation

from conftest import TINY_FLAGS, Ran, check_refused, random_vit, write_image
from diffrate import DiffRateError, Schedule
from diffrate.cli import train as commands
from diffrate.training import DEIT, FINETUNE, Recipe
from diffrate.training.objective import Objective
from diffrate.training.optimizer import build_optimizer

# DeiT (Touvron et al., 2021), table 9, for both: no clipping, and a learning rate for each 512 images of a batch. What
# the table calls probabilities of mixup and CutMix are their alphas in the published training.
AUGMENTATION = {"rand_augment": 9, "mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1, "erasing": 0.25}
SHARED = {"opt": "adamw", "batch_size": 1024, "weight_decay": 0.05, "clip_grad": 0.0, **AUGMENTATION}
FROM_SCRATCH = {
    **SHARED, "epochs": 300, "lr": 5e-4 * 1024 / 512, "warmup_epochs": 5, "warmup_lr": 1e-6, "min_lr": 1e-5,
    "repeats": 3,
}  # fmt: skip
# DiffRate (Chen et al., 2023): the schedule fixed, from trained weights.
TUNING = {**SHARED, "epochs": 30, "lr": 2e-5, "min_lr": 1e-6, "warmup_epochs": 0, "repeats": 1}
# What neither paper has: each would be another training.
OFF = {"layer_decay": 1.0, "distillation": 0.0, "ema_decay": 0.0, "accumulate": 1}
CASES = [("finetune", FINETUNE, TUNING), ("train", DEIT, FROM_SCRATCH)]


@pytest.mark.parametrize(("_", "recipe", "paper"), CASES)
def test_recipes_have_the_numbers_of_their_papers(_: str, recipe: Recipe, paper: dict[str, Any]) -> None:
    expected = {**paper, **OFF}
    assert {name: getattr(recipe, name) for name in expected} == expected


@pytest.mark.parametrize(("_", "recipe", "paper"), CASES)
def test_the_learning_rate_goes_where_the_paper_has_it(_: str, recipe: Recipe, paper: dict[str, Any]) -> None:
    model, steps = random_vit(depth=1), 10
    optimizer, scheduler = build_optimizer(model, recipe, steps, torch.device("cpu"))
    assert type(optimizer) is torch.optim.AdamW
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays[id(model.blocks[0].attn.qkv.weight)] == 0.05
    assert decays[id(model.blocks[0].norm1.weight)] == decays[id(model.cls_token)] == 0
    warm, end = paper["warmup_epochs"] * steps, paper["epochs"] * steps
    for step in (0, 1, 25, 49, 50, end // 2, end - 1, end):
        scheduler.step_update(step)
        if step < warm:
            rate = 1e-6 + (paper["lr"] - 1e-6) * step / warm
        else:
            half = (1 + math.cos(math.pi * step / end)) / 2
            rate = paper["min_lr"] + (paper["lr"] - paper["min_lr"]) * half
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate] * 2), step


@pytest.mark.parametrize(("command", "_", "paper"), CASES)
def test_a_command_without_flags_trains_by_its_paper(
    tmp_path: Path,
    diffrate_cli: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
    fresh_accelerate: None,
    command: str,
    _: Recipe,
    paper: dict[str, Any],
) -> None:
    """Up to where the training would begin: the recipe, what it made of images and loss, and the model's drop path."""
    for i in range(6):
        write_image(tmp_path / ("train" if i < 3 else "val") / f"{i % 3:03d}" / f"{i}.png", seed=i)
    Schedule([17, 14, 10, 6], [17, 12, 8, 4]).save(tmp_path / "schedule.json")
    begun: list[Any] = []

    def begin(*arguments: Any, **options: Any) -> None:
        begun.extend((*arguments, options))
        raise DiffRateError("this is as far as it goes")

    monkeypatch.setattr(commands, command, begin)
    data = ["--data-dir", tmp_path, "--schedule", tmp_path / "schedule.json", "--workers", 0]
    ran = diffrate_cli(command, *TINY_FLAGS, *data, "--output", tmp_path / "run", "--device", "cpu")
    check_refused(ran, "this is as far as it goes")
    *models, training, _validation, _output, recipe, options = begun
    expected = {**paper, **OFF}
    assert {name: getattr(recipe, name) for name in expected} == expected
    assert options["accelerator"].mixed_precision == "bf16"
    assert models[-1].original.blocks[-1].drop_path1.drop_prob == pytest.approx(0.1)  # stochastic depth

    transforms = training.transform.transforms
    (random,) = (each for each in transforms if isinstance(each, augmentations.RandAugment))
    assert {(op.magnitude, op.magnitude_std) for op in random.ops} == {(9, 0.5)}
    assert random.num_layers == 2
    (erasing,) = (each for each in transforms if isinstance(each, RandomErasing))
    assert erasing.probability == 0.25
    (crop,) = (each for each in transforms if isinstance(each, RandomResizedCropAndInterpolation))
    assert crop.scale == (0.08, 1.0)

    mix = Objective(models[-1], recipe).mix
    assert (mix.mixup_alpha, mix.cutmix_alpha, mix.mix_prob, mix.label_smoothing) == (0.8, 1.0, 1.0, 0.1)
