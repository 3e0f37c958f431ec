"""Beyond the paper: how surely held-out images choose the operator, by the temperature of the answers they compare.

Before its first step a search tries two operators at the counts it begins with, the default and the same with a floor
under every token's importance, on the images that it holds out. A row says by how many standard errors the floor is
better there. With answers as they are, a few images of which the model is unsure decide, and chance among them;
softened answers differ on every image.

Cost: fifteen passes over the held-out images for each row, of a fifth of the search images; no search.

Measured here: results/reproduce_embedded_operator_choice_cpu.json, the embedded model, where the floor is right, and
results/reproduce_vit_tiny_operator_choice_cpu.json, ViT-Ti, where it is wrong.

    python reproduce/operator_choice.py --budgets 80%,65%,52%,35%,25% \\
        --json results/reproduce_embedded_operator_choice_cpu.json
    python reproduce/operator_choice.py --model vit_tiny_patch16_224 --checkpoint vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet --crop-pct 1.0 --budgets 1.0G,0.81G,0.655G \\
        --json results/reproduce_vit_tiny_operator_choice_cpu.json
"""

from __future__ import annotations

import math

from setting import Setting, Table, main

from diffrate.costs.base import Costs
from diffrate.searching import fast
from diffrate.searching.budget import Budget, Space, rounded
from diffrate.searching.held_out import HeldOut
from diffrate.searching.images import SearchImages
from diffrate.searching.subject import Subject

PAPER = "nothing of the kind"
TITLE = "Standard errors by which a floor is better on held-out images, at temperatures"
TEMPERATURES = (1.0, 1.5, 2.0, 3.0, 4.0)
SEEDS = 3
HELD_OUT = 0.2  # of the images, as in a search
BATCH = 50


def run(setting: Setting) -> None:
    table = Table(setting, "operator_choice", TITLE, PAPER)
    subject = Subject(setting.model)
    space = Space.of(subject.backbone, Costs([subject.cost()]))
    for seed in range(SEEDS):
        images = SearchImages(*setting.search_data, HELD_OUT, seed)
        held = HeldOut(subject, images, setting.accelerator, BATCH, setting.workers)
        for budget in setting.budgets:
            setting.check_time()
            start = fast.best_start(space, Budget.of(budget), fast.OPERATOR, held, start=None, last=None)
            counts = rounded(start.counts, budget, space)
            errors = {f"{t:g}": floor_ahead(held, space, counts, t) for t in TEMPERATURES}
            table.add(f"seed {seed}", budget=budget, **errors)


def floor_ahead(held: HeldOut, space: Space, counts: list[int], temperature: float) -> float:
    """Standard errors by which the floor is better at these counts."""
    operators = fast.OPERATOR, fast.OPERATOR.changed(floor=fast.FLOOR)
    plain, floored = (held.each(fast.schedule_of(counts, space, o), temperature) for o in operators)
    difference = plain - floored
    return float(difference.mean() / (difference.std(unbiased=False) / math.sqrt(len(difference))))


if __name__ == "__main__":
    main(__doc__, run)
