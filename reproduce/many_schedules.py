"""What many schedules cost a model, image by image: in processes that share a GPU, or the cores of a CPU.

Schedules run in the order of their counts, so that blocks which they share run once (diffrate.searching.many). A small
model under one schedule is a few hundred short kernels: a process spends its time launching them, and the GPU waits. So
a dozen of them each have the model and a copy of all images, and take turns at the schedules. Under CUDA's
multi-process service their kernels also run side by side.
"""

from __future__ import annotations

import copy
import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import diffrate
from diffrate.backbones import backbone_of
from diffrate.outputs import main_output
from diffrate.portions import Portions
from diffrate.searching.many import in_order, logits_of_many
from diffrate.searching.subject import kl

EACH = 64  # schedules that a process takes at a time
AT_ONCE = {"cpu": 64, "cuda": 256}  # images of one walk, of which every schedule has its own tokens
MEASURES = (
    "loss",
    "divergence",
)  # the negative log-likelihood, and the distance from what the whole model answers

# A model, images, labels, and the views of an image, each with what the whole model answers.
Given = tuple[nn.Module, Tensor, Tensor, dict[bool, Tensor]]
_mine: Given  # of a process
_portions = Portions("the race")  # processes share the memory of a GPU


class ManySchedules:
    """A model on images, tried under schedules in `workers` processes; without any, in this one.

    On a GPU in half precision.

    both_views  an image counts by the mean of it and its mirror image.
    """

    def __init__(
        self, model: nn.Module, images: Tensor, labels: Tensor, workers: int = 0, both_views: bool = False
    ) -> None:
        if images.is_cuda:
            model, images = copy.deepcopy(model).half(), images.half()

        def answers(mirrored: bool) -> Tensor:
            return torch.cat([main_output(model(_seen(some, mirrored))).float() for some in _passes(images)])

        with torch.inference_mode():
            views = {mirrored: answers(mirrored) for mirrored in (False, True)[: 1 + both_views]}
        self.given: Given = model, images, labels, views
        self.images, self.device, self.workers = len(images), images.device, workers
        self.resources = ExitStack()
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> ManySchedules:
        if self.workers:
            file = Path(self.resources.enter_context(tempfile.TemporaryDirectory())) / "given.pt"
            torch.save(self.given, file)
            spawn = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(self.workers, spawn, _begin, (file,))
            self.resources.callback(self.pool.shutdown, cancel_futures=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.resources.close()

    def each(self, schedules: Sequence[diffrate.Schedule], part: slice) -> Tensor:
        """(S, 2, B) of a part of the images, by each of `MEASURES`."""
        order = in_order(schedules)
        some = [[schedules[i] for i in order[start : start + EACH]] for start in range(0, len(order), EACH)]
        if self.pool is None:
            found = [_each(self.given, each, part) for each in some]
        else:
            found = list(self.pool.map(_my_each, some, [part] * len(some)))
        return torch.from_numpy(np.concatenate(found))[torch.tensor(order).argsort()]


def _begin(file: Path) -> None:
    global _mine
    torch.set_num_threads(1)
    _mine = torch.load(file, weights_only=False)


def _my_each(schedules: Sequence[diffrate.Schedule], part: slice) -> np.ndarray:
    return _each(_mine, schedules, part)


@torch.inference_mode()
def _each(given: Given, schedules: Sequence[diffrate.Schedule], part: slice) -> np.ndarray:
    model, images, labels, views = given
    backbone = backbone_of(model)

    def forward(some: Tensor) -> Tensor:
        return logits_of_many(backbone, some, schedules).float().transpose(0, 1)

    def measured(some: Tensor, right: Tensor, wanted: Tensor) -> Tensor:
        answers = _portions.joined(forward, some).transpose(0, 1)  # (S, b, classes)
        loss = F.cross_entropy(answers.transpose(1, 2), right.expand(len(schedules), -1), reduction="none")
        return torch.stack([loss, kl(wanted, answers)], dim=1).double().cpu()

    total = torch.zeros(())
    for mirrored, whole in views.items():
        passes = zip(*map(_passes, (images[part], labels[part], whole[part])), strict=True)
        total = total + torch.cat([measured(_seen(some, mirrored), *rest) for some, *rest in passes], dim=-1)
    return (total / len(views)).numpy()


def _seen(images: Tensor, mirrored: bool) -> Tensor:
    return images.flip(-1) if mirrored else images


def _passes(values: Tensor) -> tuple[Tensor, ...]:
    return values.split(AT_ONCE[values.device.type])
