"""`train` and `finetune`: one loop for models with a schedule and without, on one device or on many.

timm gives the optimiser, its schedule, mixing and the moving average; accelerate the devices, precision, gradient
accumulation, processes and trackers. A model under a schedule trains with tokens really dropped. All that is random in
a step is random by the step's number, so that `resume` ends in the weights of an undisturbed run.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from safetensors.torch import load_file
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils.data import Dataset

from diffrate.compressed import CompressedModel, compress
from diffrate.errors import DiffRateError
from diffrate.evaluate import evaluate
from diffrate.processes import together
from diffrate.run_folder import RunFolder
from diffrate.schedule import Schedule
from diffrate.training.batches import training_batches, validation_batches
from diffrate.training.checkpoint import (
    Progress,
    gather_state,
    load_state,
    load_weights,
    save_state,
    whole_state,
    write_tensors,
)
from diffrate.training.gradients import Gradients
from diffrate.training.objective import Objective
from diffrate.training.optimizer import build_optimizer
from diffrate.training.recipe import FINETUNE, Recipe
from diffrate.training.report import Bar

BEST, LAST, STATE = "weights.safetensors", "last.safetensors", "state.safetensors"
METHOD = "method"  # in config.json: the name and settings of the method that a run was under, in place of a schedule
LOG_STEPS = 50  # between two entries of a tracker


@dataclass
class Trained:
    """What a training returns: where the run got to; the model itself holds the best weights."""

    accuracy: float  # of the best weights on the validation images, in percent
    epoch: int  # that gave them, from 1
    seconds: float
    history: list[dict[str, float]]  # loss, accuracy, learning rate and seconds of every epoch


def finetune(
    model: nn.Module,
    schedule: Schedule | CompressedModel,
    dataset: Dataset[Any],
    validation: Dataset[Any],
    output: str | os.PathLike[str],
    recipe: Recipe = FINETUNE,
    **options: Any,
) -> Trained:
    """Tune `model`, in place, under a schedule: tokens are dropped as they will be when it serves.

    schedule  or `model` under a method, as diffrate.methods.to_train makes it, which may bring a loss of its own.
    With `recipe.distillation`, or where the method's loss asks for one, the model as it came is the teacher. Other
    options are those of `train`.
    """
    tuned = schedule if isinstance(schedule, CompressedModel) else compress(model, schedule)
    needs_teacher = recipe.distillation or _objective(tuned).needs_teacher
    teacher = copy.deepcopy(model) if needs_teacher else None
    return train(tuned, dataset, validation, output, recipe, teacher=teacher, **options)


def train(
    model: nn.Module,
    dataset: Dataset[Any],
    validation: Dataset[Any],
    output: str | os.PathLike[str],
    recipe: Recipe | None = None,
    *,
    teacher: nn.Module | None = None,
    accelerator: Accelerator | None = None,
    workers: int = 0,
    resume: bool = False,
    max_minutes: float = math.inf,
    save_minutes: float = 10.0,
    dtype: torch.dtype | None = None,
    origin: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Trained:
    """Train a classifier in place and leave it at its best weights, those of `output/weights.safetensors`.

    model       any model that `compress` takes, or a compressed one, which trains under its schedule.
    teacher     whose answers count by `recipe.distillation`.
    dataset     (image, label) pairs, which augment themselves; one that holds its images as a tensor is augmented here.
    output      folder: the best weights on `validation` (of the moving average where the recipe has one), those of
                the last epoch in last.safetensors, and in state.safetensors what `resume` goes on from, saved after
                every epoch and every `save_minutes`.
    origin      where weights and images come from: a resumed run must have the same.
    max_minutes when this would run out during the next epoch, training stops before it.
    dtype       of the best weights on disk; the model's own without it.
    """
    recipe = recipe or Recipe()
    accelerator = accelerator or Accelerator(mixed_precision=recipe.precision)
    with together(accelerator.num_processes, "training", Path(output) / STATE):
        run = Run(
            model, dataset, validation, Path(output), recipe, teacher, accelerator, workers, resume,
            dict(origin or {}), dtype, save_minutes, progress,
        )  # fmt: skip
        return run.to_the_end(max_minutes)


def accuracy(model: nn.Module, dataset: Dataset[Any], batch_size: int = 1000, workers: int = 0) -> float:
    """Top-1 accuracy in percent, on the model's device."""
    device = next(model.parameters()).device
    return evaluate(model, validation_batches(dataset, batch_size, workers), device, progress=False).top1


class Run:
    """One training: what is prepared once, and what changes with every step."""

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset[Any],
        validation: Dataset[Any],
        output: Path,
        recipe: Recipe,
        teacher: nn.Module | None,
        accelerator: Accelerator,
        workers: int,
        resume: bool,
        origin: dict[str, Any],
        dtype: torch.dtype | None,
        save_minutes: float,
        progress: bool,
    ) -> None:
        self.begin = self.saved = time.monotonic()
        self.model, self.validation, self.output, self.recipe = model, validation, output, recipe
        self.workers, self.dtype, self.save_seconds = workers, dtype, 60 * save_minutes
        self.accelerator = accelerator
        self.accelerator.gradient_accumulation_steps = recipe.accumulate
        self.accelerator.step = 0
        self.process, self.processes = self.accelerator.process_index, self.accelerator.num_processes
        recipe.check_parts(self.processes)
        if recipe.distillation and teacher is None:
            raise DiffRateError(
                "distillation needs a teacher: finetune has one, training from scratch does not"
            )
        self.objective = _objective(model)(model, recipe, teacher)
        device = self.accelerator.device
        self.batches = training_batches(dataset, recipe, device, workers)
        self.steps = len(dataset) // recipe.batch_size  # type: ignore[arg-type]
        self.sharded = self.accelerator.distributed_type == DistributedType.FSDP
        if self.sharded:
            plugin = self.accelerator.state.fsdp_plugin
            if plugin.fsdp_version != 2:
                raise DiffRateError("of FSDP, training knows version 2 alone: set fsdp_version to 2")
            # It looks for weights under the names they have in a state, where a compressed model leaves a level out.
            plugin.cpu_ram_efficient_loading = False
        if self.sharded and recipe.ema_decay:
            raise DiffRateError(
                "a moving average needs whole weights in every process: with FSDP set ema_decay to 0"
            )
        made = model.settings() if isinstance(model, CompressedModel) else {}
        config = {
            "recipe": asdict(recipe), "images": len(dataset), "origin": origin,  # type: ignore[arg-type]
            "schedule": made.get("schedule"),
            **({METHOD: made} if METHOD in made else {}),
        }  # fmt: skip
        optimizer, self.scheduler = build_optimizer(model, recipe, self.steps, device)
        self.folder = RunFolder(output, config, resume, self.accelerator, "training")
        model.to(device)
        set_seed(recipe.seed)
        self.ema = (
            ModelEmaV3(model, decay=recipe.ema_decay, use_warmup=True, warmup_power=0.75)
            if recipe.ema_decay
            else None
        )
        if teacher is not None:
            teacher.to(device).eval().requires_grad_(False)
        if recipe.grad_checkpointing:
            _set_checkpointing(model, True)
        self.prepared, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.gradients = Gradients(self.prepared, self.objective, recipe, self.accelerator)
        self.now = Progress()
        if resume and (output / STATE).is_file():
            average = None if self.ema is None else self.ema.module
            self.now = load_state(output / STATE, model, average, self.optimizer.optimizer)
            if self.accelerator.scaler is not None and self.now.scaler:
                self.accelerator.scaler.load_state_dict(self.now.scaler)
            self.begin -= self.now.seconds
            self.scheduler.step_update(self.now.step)
        self.bar = Bar(progress and self.accelerator.is_main_process, recipe, self.steps, done=self.now.step)
        self.accelerator.wait_for_everyone()

    def to_the_end(self, max_minutes: float) -> Trained:
        now, last = self.now, self.steps * self.recipe.epochs
        try:
            with self.bar:
                parts = self.batches.parts(now.step, last, self.process, self.processes)
                while now.step < last and self._has_time(max_minutes):
                    self._epoch(parts)
        finally:
            # What compiled it and autocast come off the caller's model.
            self.gradients.end()
            self.accelerator.unwrap_model(self.prepared, keep_fp32_wrapper=False)
            if self.recipe.grad_checkpointing:
                _set_checkpointing(self.model, False)
        self.accelerator.wait_for_everyone()
        load_weights(self.model, load_file(self.output / BEST))
        self.model.eval()
        return Trained(now.best, now.best_epoch, now.seconds, now.history)

    def _epoch(self, parts: Any) -> None:
        now, begun = self.now, time.monotonic()
        start = begun - now.epoch_seconds  # of which an interrupted run had spent some
        device = self.accelerator.device
        epoch, first = now.step // self.steps + 1, now.step
        total = torch.tensor(now.loss, dtype=torch.float64, device=device)
        self.prepared.train()
        while now.step < epoch * self.steps:
            total += self._step(parts)  # read once an epoch: the device never waits for the host
            if now.step % LOG_STEPS == 0 and self.accelerator.trackers:
                self.accelerator.log(
                    {"loss": total.item() / (now.step - (epoch - 1) * self.steps)}, step=now.step
                )
            # After an epoch's last step the state waits for its accuracy: one from before would go on without it.
            due = now.step < epoch * self.steps and time.monotonic() - self.saved > self.save_seconds
            if due and not self.sharded:
                now.loss, now.epoch_seconds = total.item(), time.monotonic() - start
                self._save()
        mean = float(self.accelerator.reduce(total, "mean")) / self.steps
        if not math.isfinite(mean):
            kept = (
                f"the weights of epoch {now.best_epoch} are kept"
                if now.best_epoch
                else "there are no weights"
            )
            raise DiffRateError(f"the loss became {mean} in epoch {epoch}; {kept}: try a lower learning rate")
        now.loss = now.epoch_seconds = 0.0
        rate = (now.step - first) * self.recipe.batch_size / (time.monotonic() - begun)
        score = self._accuracy()
        seconds = time.monotonic() - start
        lr = max(group["lr"] / group.get("lr_scale", 1) for group in self.optimizer.param_groups)
        now.history.append({"loss": mean, "accuracy": score, "lr": lr, "seconds": seconds})
        self._keep(score, epoch)
        self._save()
        self.accelerator.log({"epoch loss": mean, "accuracy": score, "lr": lr}, step=now.step)
        self.bar.epoch(epoch, now.history, rate)

    def _step(self, parts: Any) -> Tensor:
        """One step of the optimiser; the mean loss of this process's parts of it."""
        now, recipe, accelerator = self.now, self.recipe, self.accelerator
        drawn = []
        for part in range(recipe.accumulate):
            images, labels = next(parts)
            self._seed(part)
            drawn.append(self.objective.mixed(images, labels))  # once: it happens in place
        total = self.gradients.add(drawn, self._seed)
        if recipe.clip_grad:
            accelerator.clip_grad_norm_(self.prepared.parameters(), recipe.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        now.step += 1
        self.scheduler.step_update(now.step)
        if self.ema is not None:
            self.ema.update(self.model, now.step)
        self.bar.advance()
        return total

    def _seed(self, part: int) -> None:
        """All that is random in a part of a step by its number: each is mixed as the whole batch, but drops its own."""
        number = (self.recipe.seed * 1_000_003 + self.now.step) % 2**31
        set_seed(number)
        torch.manual_seed(number + 7919 * part)

    def _accuracy(self) -> float:
        """Top-1 on the validation images in percent, each process on its share of them."""
        batches = validation_batches(
            self.validation, self.recipe.batch_size, self.workers, self.process, self.processes
        )
        tested = self.prepared if self.ema is None else self.ema.module
        with self.accelerator.autocast(), self.gradients.uncompiled():
            seen = evaluate(tested, batches, self.accelerator.device, progress=False)
        sums = torch.tensor([seen.top1 * seen.images, seen.images], device=self.accelerator.device)
        correct, images = self.accelerator.reduce(sums, "sum").tolist()
        return float(correct / images)

    def _keep(self, score: float, epoch: int) -> None:
        """The weights of this epoch as the last, and as the best if they are."""
        kept = whole_state(self.model if self.ema is None else self.ema.module)
        best = score >= self.now.best
        if best:
            self.now.best, self.now.best_epoch = score, epoch
        if self.accelerator.is_main_process:
            write_tensors(self.output / LAST, kept)
            if best:
                smaller = {k: v.to(self.dtype) if v.is_floating_point() else v for k, v in kept.items()}
                write_tensors(self.output / BEST, kept if self.dtype is None else smaller)

    def _save(self) -> None:
        self.now.seconds = time.monotonic() - self.begin
        scaler = self.accelerator.scaler
        self.now.scaler = None if scaler is None else scaler.state_dict()
        if self.sharded or self.accelerator.is_main_process:
            average = None if self.ema is None else self.ema.module
            state = gather_state(self.model, average, self.optimizer.optimizer)
            if self.accelerator.is_main_process:
                save_state(self.output / STATE, state, self.now)
        self.saved = time.monotonic()

    def _has_time(self, max_minutes: float) -> bool:
        """Whether the next epoch still fits; the slowest process decides for all."""
        if not self.now.history:
            return True
        # the first epoch also compiles, so the quickest one tells how long the next will take
        pace = min(epoch["seconds"] for epoch in self.now.history)
        late = float(time.monotonic() - self.begin + pace > 60 * max_minutes)
        return not self.accelerator.reduce(torch.tensor(late, device=self.accelerator.device), "sum").item()


def _objective(model: nn.Module) -> type[Objective]:
    """What a model is tuned by: its method's own loss where it is under one that has it."""
    return getattr(model, "objective", Objective)


def _set_checkpointing(model: nn.Module, on: bool) -> None:
    switch = getattr(model, "set_grad_checkpointing", None)
    if switch is None:
        raise DiffRateError(f"{type(model).__name__} has no gradient checkpointing")
    switch(on)
