"""What many schedules cost a model, image by image: processes that share a GPU.

A small model under one schedule is a few hundred short kernels: a process spends its time launching them, and the GPU
waits. So a dozen of them each have the model and a copy of all images, and take turns at the schedules. Under
CUDA's multi-process service their kernels also run side by side.
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
from diffrate.outputs import main_output
from diffrate.searching.subject import kl

EACH = 64  # schedules that a process takes at a time
AT_ONCE = 1024  # images of one forward pass
MEASURES = (
    "loss",
    "divergence",
)  # the negative log-likelihood, and the distance from what the whole model answers

Given = tuple[nn.Module, Tensor, Tensor, Tensor]  # model, images, labels, and what the whole model answers
_mine: Given  # of a process


class ManySchedules:
    """A model on images, tried under schedules in `workers` processes; without any, in this one.

    On a GPU in half precision.
    """

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor, workers: int = 0) -> None:
        if images.is_cuda:
            model, images = copy.deepcopy(model).half(), images.half()
        with torch.inference_mode():
            answers = _answers(model, images)
        self.given: Given = model, images, labels, answers
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
        if self.pool is None:
            return torch.from_numpy(_each(self.given, schedules, part))
        some = [schedules[i : i + EACH] for i in range(0, len(schedules), EACH)]
        return torch.from_numpy(np.concatenate(list(self.pool.map(_my_each, some, [part] * len(some)))))


def _begin(file: Path) -> None:
    global _mine
    torch.set_num_threads(1)
    _mine = torch.load(file, weights_only=False)


def _my_each(schedules: Sequence[diffrate.Schedule], part: slice) -> np.ndarray:
    return _each(_mine, schedules, part)


@torch.inference_mode()
def _each(given: Given, schedules: Sequence[diffrate.Schedule], part: slice) -> np.ndarray:
    model, images, labels, whole = given
    rows = []
    for schedule in schedules:
        answers = _answers(diffrate.compress(model, schedule), images[part])
        loss = F.cross_entropy(answers, labels[part], reduction="none")
        rows.append(torch.stack([loss, kl(whole[part], answers)]))
    return torch.stack(rows).double().cpu().numpy()


def _answers(model: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([main_output(model(some)).float() for some in images.split(AT_ONCE)])
