"""Accuracy, loss and speed of a model over a loader, and the paired comparison of two models on the same images.

The sampling error of one accuracy is a point or more on a few thousand images; the difference of two models on the
same images is far less noisy, and the difference of their losses less again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from diffrate.devices import autocast, now
from diffrate.errors import DiffRateError
from diffrate.modes import evaluating
from diffrate.outputs import main_output
from diffrate.paired import bootstrap_intervals, mcnemar
from diffrate.portions import Portions


@dataclass(frozen=True)
class Comparison:
    """A model against a reference on the same images; every difference is model minus reference."""

    top1_difference: float  # in points
    top1_standard_error: float
    loss_difference: float
    loss_standard_error: float
    gained: int  # images that only the model gets right
    lost: int  # images that only the reference gets right
    changed: int  # images with another prediction, right or wrong
    images: int
    top1_interval: tuple[float, float]  # 95 % of the differences when images are drawn anew, in points
    loss_interval: tuple[float, float]
    mcnemar_p: float  # that gains and losses differ this much by chance


@dataclass(frozen=True)
class Evaluation:
    """What a model does on a set of images; accuracies in percent, loss as mean negative log-likelihood."""

    top1: float
    top5: float
    loss: float
    images: int
    images_per_second: float  # forward passes only
    predicted: Tensor = field(repr=False, compare=False)  # (images,) class indices
    correct: Tensor = field(repr=False, compare=False)  # (images,) bool
    nll: Tensor = field(repr=False, compare=False)  # (images,) float
    labels: Tensor = field(repr=False, compare=False)  # (images,) class indices
    reference: Evaluation | None = None
    comparison: Comparison | None = None


def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    device: str | torch.device = "cpu",
    amp: bool = False,
    amp_dtype: str = "float16",
    compare: nn.Module | None = None,
    progress: bool = True,
) -> Evaluation:
    """Evaluate `model`; with `compare`, that model too, batch by batch in the same pass over the data."""
    device = torch.device(device)
    models = [model] if compare is None else [model, compare]
    for each in models:
        each.to(device)
    runs = [_Run() for _ in models]
    portions = Portions("the evaluation")
    with evaluating(*models), torch.inference_mode():
        for images, labels in _tracked(loader, progress):
            images, labels = images.to(device), labels.to(device)
            for each, run in zip(models, runs, strict=True):
                logits, seconds = _timed(each, images, portions, amp, amp_dtype)
                run.add(logits, labels, seconds)
    results = [run.summary() for run in runs]
    if compare is None:
        return Evaluation(**results[0])
    reference = Evaluation(**results[1])
    return Evaluation(
        **results[0], reference=reference, comparison=compare_evaluations(Evaluation(**results[0]), reference)
    )


def evaluate_in_turn(
    models: Mapping[str, nn.Module],
    loader: Iterable[Any],
    device: str | torch.device = "cpu",
    amp: bool = False,
    amp_dtype: str = "float16",
    after: Callable[[str, Tensor], None] | None = None,
    warm_up: bool = True,
    progress: bool = True,
) -> dict[str, Evaluation]:
    """Every model on every batch, one after the other, in an order that rotates; speeds are medians over batches.

    after    called with a model's name and the images, untimed, once it has seen them.
    warm_up  run each model once on the first batch before any is timed.
    """
    device = torch.device(device)
    names = list(models)
    runs = {name: _Run() for name in names}
    portions = Portions("the evaluation")
    for model in models.values():
        model.to(device)
    with evaluating(*models.values()), torch.inference_mode():
        for i, (images, labels) in enumerate(_tracked(loader, progress)):
            images, labels = images.to(device), labels.to(device)
            if warm_up and i == 0:
                for model in models.values():
                    _timed(model, images, portions, amp, amp_dtype)
                    model.eval()  # anew, for a model whose images take turns
            for name in names[i % len(names) :] + names[: i % len(names)]:
                logits, seconds = _timed(models[name], images, portions, amp, amp_dtype)
                runs[name].add(logits, labels, seconds)
                if after is not None:
                    with autocast(device, amp, amp_dtype):
                        for part in images.split(portions.most or len(images)):
                            after(name, part)
    return {
        name: Evaluation(**{**run.summary(), "images_per_second": run.median_speed()})
        for name, run in runs.items()
    }


def _timed(
    model: nn.Module, images: Tensor, portions: Portions, amp: bool, amp_dtype: str
) -> tuple[Tensor, float]:
    """Logits and the seconds they took, without those of attempts for which there was no memory."""
    device, started = images.device, 0.0

    def run(parts: list[slice]) -> Tensor:
        nonlocal started
        started = now(device)
        with autocast(device, amp, amp_dtype):
            logits = [main_output(model(images[part])) for part in parts]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    answers = portions.fitted(run, len(images))
    return answers, now(device) - started


def compare_evaluations(model: Evaluation, reference: Evaluation) -> Comparison:
    """The paired comparison of two evaluations over the same images in the same order."""
    if model.images != reference.images:
        raise DiffRateError(f"cannot pair {model.images} images with {reference.images}")
    if model.images < 2:
        raise DiffRateError("a paired comparison needs at least 2 images")
    right = model.correct.double() - reference.correct.double()
    nll = model.nll.double() - reference.nll.double()
    top1_interval, loss_interval = bootstrap_intervals(torch.stack([100 * right, nll]))
    gained, lost = int((right > 0).sum()), int((right < 0).sum())
    return Comparison(
        top1_difference=100 * right.mean().item(),
        top1_standard_error=100 * _standard_error(right),
        loss_difference=nll.mean().item(),
        loss_standard_error=_standard_error(nll),
        gained=gained,
        lost=lost,
        changed=int((model.predicted != reference.predicted).sum()),
        images=model.images,
        top1_interval=top1_interval,
        loss_interval=loss_interval,
        mcnemar_p=mcnemar(gained, lost),
    )


def _standard_error(differences: Tensor) -> float:
    return differences.std().item() / math.sqrt(len(differences))


class _Run:
    """The outcome of one model, collected batch by batch."""

    def __init__(self) -> None:
        self.predicted: list[Tensor] = []
        self.correct: list[Tensor] = []
        self.nll: list[Tensor] = []
        self.labels: list[Tensor] = []
        self.top5: list[Tensor] = []
        self.seconds: list[float] = []

    def add(self, logits: Tensor, labels: Tensor, seconds: float) -> None:
        # Distilled models give a pair of logits while training only; here there is one tensor.
        logits = logits.float()  # (B, classes)
        classes = logits.shape[-1]
        if not bool(torch.isfinite(logits).all()):
            raise DiffRateError(
                "the model gives logits that are not finite: evaluate it in float32 or bfloat16"
            )
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise DiffRateError(
                f"labels go from {int(labels.min())} to {int(labels.max())}, but the model has {classes} classes"
            )
        best = logits.topk(min(5, classes), dim=-1).indices  # (B, 5)
        self.predicted.append(best[:, 0].cpu())
        self.correct.append((best[:, 0] == labels).cpu())
        self.top5.append((best == labels[:, None]).any(-1).cpu())
        self.nll.append(F.cross_entropy(logits, labels, reduction="none").cpu())
        # A copy: what a worker process sends holds a file descriptor open, of which there are too few.
        self.labels.append(labels.to("cpu", copy=True))
        self.seconds.append(seconds)

    def median_speed(self) -> float:
        """Images per second of the batch in the middle: a moment of other work on the machine does not count."""
        return statistics.median(
            len(nll) / max(s, 1e-9) for nll, s in zip(self.nll, self.seconds, strict=True)
        )

    def summary(self) -> dict[str, Any]:
        if not self.nll:
            raise DiffRateError("there are no images to evaluate")
        correct, nll = torch.cat(self.correct), torch.cat(self.nll)
        # The first batch pays for warming up, so it counts only when there is no other.
        timed = slice(1, None) if len(self.nll) > 1 else slice(None)
        return {
            "top1": 100 * correct.double().mean().item(),
            "top5": 100 * torch.cat(self.top5).double().mean().item(),
            "loss": nll.double().mean().item(),
            "images": len(nll),
            "images_per_second": sum(map(len, self.nll[timed])) / max(sum(self.seconds[timed]), 1e-9),
            "predicted": torch.cat(self.predicted),
            "correct": correct,
            "nll": nll,
            "labels": torch.cat(self.labels),
        }


def _tracked(loader: Iterable[Any], progress: bool) -> Iterator[Any]:
    """The batches, with a progress bar on stderr when that is a terminal."""
    console = Console(stderr=True)
    length = getattr(loader, "__len__", lambda: 0)() or None
    with Progress(console=console, transient=True, disable=not (progress and console.is_terminal)) as bar:
        yield from bar.track(loader, total=length, description="Evaluating")
