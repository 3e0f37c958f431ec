"""The held-out images of a search: what decides which schedule is returned."""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from diffrate.portions import Portions
from diffrate.schedule import Schedule
from diffrate.searching.images import SearchImages
from diffrate.searching.subject import Subject


class HeldOut:
    """Held-out images on the device, with what the uncompressed model says of them; each process has its share."""

    def __init__(
        self, subject: Subject, images: SearchImages, accelerator: Accelerator, batch_size: int, workers: int
    ) -> None:
        self.subject, self.accelerator = subject, accelerator
        self.portions = Portions("the check on held-out images")
        self.unreadable: list[str] = []
        self.batches: list[tuple[Tensor, Tensor]] = []
        subject.model.eval()
        whole = subject.under(None)
        process, processes = accelerator.process_index, accelerator.num_processes
        for batch in images.held_out_batches(batch_size, workers, process, processes):
            self.unreadable += batch.unreadable
            if not len(batch.images):
                continue
            with torch.no_grad(), accelerator.autocast():
                # A copy: what a worker process sends holds a file descriptor open, of which there are too few.
                held = batch.images.to(accelerator.device, copy=True)
                self.batches.append((held, self.portions.joined(whole, held)))

    @torch.no_grad()
    def each(self, schedule: Schedule, temperature: float | None = None) -> Tensor:
        """Divergence of the model under a schedule from the whole one, on each image of this process."""
        self.subject.model.eval()
        compressed = self.subject.under(schedule)
        found = [torch.zeros(0, dtype=torch.float64, device=self.accelerator.device)]
        for images, teacher in self.batches:
            with self.accelerator.autocast():
                answers = self.portions.joined(compressed, images)
                found.append(self.subject.divergence(teacher, answers, temperature).double())
        return torch.cat(found)

    def mean(self, each: Tensor) -> float:
        """The mean over the images of all processes."""
        count, total = self._sums(torch.ones_like(each), each)
        return total / count

    def clearly_above(self, each: Tensor, other: Tensor, errors: float = 1.0) -> bool:
        """Whether `each` lies above `other`, image by image, by more than some standard errors of their difference."""
        difference = each - other
        count, total, squares = self._sums(torch.ones_like(each), difference, difference.square())
        mean = total / count
        variance = max(squares / count - mean**2, 0.0)
        return mean > errors * math.sqrt(variance / count)

    def _sums(self, *values: Tensor) -> list[float]:
        total: Any = self.accelerator.reduce(torch.stack([v.sum() for v in values]), reduction="sum")
        return [float(x) for x in total]
