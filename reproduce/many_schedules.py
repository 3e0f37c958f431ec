"""Losses of a model under many schedules: processes that share a GPU.

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

EACH = 64  # schedules that a process takes at a time
AT_ONCE = 512  # images of one forward pass

_mine: tuple[nn.Module, Tensor, Tensor]  # in a process: model, images and labels


class ManySchedules:
    """A model on images, whose losses under schedules come from `workers` processes; without any, from this one.

    On a GPU in half precision.
    """

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor, workers: int = 0) -> None:
        if images.is_cuda:
            model, images = copy.deepcopy(model).half(), images.half()
        self.given = model, images, labels
        self.workers = workers
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

    def losses(self, schedules: Sequence[diffrate.Schedule], part: slice) -> Tensor:
        """(S, B) negative log-likelihoods of a part of the images."""
        if self.pool is None:
            return torch.from_numpy(_losses(self.given, schedules, part))
        some = [schedules[i : i + EACH] for i in range(0, len(schedules), EACH)]
        rows = self.pool.map(_my_losses, some, [part] * len(some))
        return torch.from_numpy(np.concatenate(list(rows)))


def _begin(file: Path) -> None:
    global _mine
    torch.set_num_threads(1)
    _mine = torch.load(file, weights_only=False)


def _my_losses(schedules: Sequence[diffrate.Schedule], part: slice) -> np.ndarray:
    return _losses(_mine, schedules, part)


@torch.inference_mode()
def _losses(
    given: tuple[nn.Module, Tensor, Tensor], schedules: Sequence[diffrate.Schedule], part: slice
) -> np.ndarray:
    model, images, labels = given
    rows = []
    for schedule in schedules:
        compressed = diffrate.compress(model, schedule)
        logits = torch.cat([main_output(compressed(some)) for some in images[part].split(AT_ONCE)])
        rows.append(F.cross_entropy(logits.float(), labels[part], reduction="none"))
    return torch.stack(rows).double().cpu().numpy()
