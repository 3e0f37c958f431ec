"""Beyond the paper: counts that are learned from softened answers, among random schedules of the same MACs.

A search makes the divergence from the whole model small on its images. Where the model is sure of most of them, a few
make nearly all of it; answers that are softened by a temperature, as in distillation, differ on more images, but also
count classes that no image has. Which of both weighs more, by the divergence and the loss on validation images, which
are not softened: for each search, how many random schedules under its operator are better.

Cost: a search for each temperature, seed and budget, and the random schedules on all validation images.

Measured here: results/reproduce_embedded_temperatures_h200.json, ten classes, and
results/reproduce_vit_tiny_temperatures_h200.json, a thousand.

    python reproduce/temperatures.py --budgets 52%,35%,25% --random 500 \\
        --json results/reproduce_embedded_temperatures_h200.json
    python reproduce/temperatures.py --model vit_tiny_patch16_224 --checkpoint vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet --crop-pct 1.0 --budgets 0.81G,0.655G --random 400 \\
        --json results/reproduce_vit_tiny_temperatures_h200.json
"""

from __future__ import annotations

import setting as shared
import torch
from many_schedules import MEASURES, ManySchedules
from setting import Setting, Table
from torch import Tensor, nn

import diffrate
from diffrate.methods.schedules import random_schedules
from diffrate.searching.subject import Subject

PAPER = "nothing of the kind"
TITLE = "Searches by softened answers, and how many random schedules are better"
TEMPERATURES = (1.0, 2.0, 4.0)


class Softened(Subject):
    """A classifier whose answers are compared at one temperature, whatever its classes."""

    def __init__(self, model: nn.Module, temperature: float) -> None:
        super().__init__(model)
        self.temperature = temperature

    def divergence(self, teacher: Tensor, answers: Tensor, temperature: float | None = None) -> Tensor:
        return super().divergence(teacher, answers, temperature or self.temperature)


def run(setting: Setting, random: int = 500, seeds: int = 3, runners: int = 0) -> None:
    table = Table(setting, "temperatures", TITLE, PAPER)
    images, labels = (torch.cat(parts) for parts in zip(*setting.val, strict=True))
    every = slice(0, len(labels))
    drawn: dict[tuple[float, str], Tensor] = {}  # means of random schedules, by budget and operator
    with ManySchedules(setting.model, images, labels, runners) as many:
        for budget in setting.budgets:
            for temperature in TEMPERATURES:
                for seed in range(seeds):
                    setting.check_time()
                    found = diffrate.search(
                        Softened(setting.model, temperature), setting.search_data, budget, seed=seed, progress=False,
                        steps=setting.steps, batch_size=setting.search_batch, workers=setting.workers,
                        accelerator=setting.accelerator,
                    ).schedule  # fmt: skip
                    key = budget, repr(found.operator)
                    if key not in drawn:
                        others = random_schedules(
                            setting.model, budget, range(random), found.operator, last_is_free=True
                        )
                        drawn[key] = many.each(others, every).mean(-1)
                    own = many.each([found], every).mean(-1)[0]
                    add(table, temperature, seed, budget, found, own, drawn[key])


def add(
    table: Table,
    temperature: float,
    seed: int,
    budget: float,
    found: diffrate.Schedule,
    own: Tensor,
    drawn: Tensor,
) -> None:
    better = (drawn < own).sum(0).tolist()
    table.add(
        f"temperature {temperature:g}",
        budget=budget,
        seed=seed,
        floor=found.operator.floor,
        **dict(zip(MEASURES, own.tolist(), strict=True)),
        **{f"random_ones_with_less_{by}": n for by, n in zip(MEASURES, better, strict=True)},
        random_ones=len(drawn),
        settings={"schedule": found.to_dict()},
    )


def main() -> None:
    flags = shared.parser(__doc__)
    flags.add_argument("--random", type=int, default=500, help="random schedules at each budget")
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--runners", type=int, default=0, help="processes that evaluate the random ones")
    arguments = flags.parse_args()
    with shared.ended_in_a_sentence():
        run(shared.setting(arguments), arguments.random, arguments.seeds, arguments.runners)


if __name__ == "__main__":
    main()
