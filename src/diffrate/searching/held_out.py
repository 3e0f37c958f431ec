"""The held-out images of a search: what decides which schedule is returned."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from diffrate.compressed import compress
from diffrate.outputs import main_output
from diffrate.schedule import Schedule
from diffrate.searching.images import SearchImages


class HeldOut:
    """Held-out images on the device, with what the uncompressed model says of them; each process has its share."""

    def __init__(
        self, model: nn.Module, images: SearchImages, accelerator: Accelerator, batch_size: int, workers: int
    ) -> None:
        self.model, self.accelerator = model, accelerator
        self.unreadable: list[str] = []
        self.batches: list[tuple[Tensor, Tensor]] = []
        model.eval()
        process, processes = accelerator.process_index, accelerator.num_processes
        for batch in images.held_out_batches(batch_size, workers, process, processes):
            self.unreadable += batch.unreadable
            if not len(batch.images):
                continue
            with torch.no_grad(), accelerator.autocast():
                held = batch.images.to(accelerator.device)
                self.batches.append((held, logits_of(model, held)))

    @torch.no_grad()
    def divergence(self, schedule: Schedule) -> float:
        """Mean divergence of the model under a schedule from the whole one."""
        self.model.eval()
        compressed = compress(self.model, schedule)
        sums = torch.zeros(2, dtype=torch.float64, device=self.accelerator.device)
        for images, teacher in self.batches:
            with self.accelerator.autocast():
                each = divergence(teacher, logits_of(compressed, images))
            sums += torch.stack([each.sum(dtype=torch.float64), sums.new_tensor(float(len(each)))])
        total: Any = self.accelerator.reduce(sums, reduction="sum")
        return float(total[0] / total[1])


def divergence(teacher: Tensor, logits: Tensor) -> Tensor:
    """KL(teacher || student) per image, (..., B), in fp32."""
    target = teacher.float().log_softmax(dim=-1)
    return (target.exp() * (target - logits.float().log_softmax(dim=-1))).sum(dim=-1)


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """Logits, of the first head where there are two."""
    return main_output(model(images))
