"""Table 2 where there are no more images than a search has: what tuning on them gives back of what compression lost.

The model under searched schedules, and under other methods at their MACs, is tuned on the search's own images and
measured on the validation images; with the uncompressed model, tuned alike, as control. "distilled": the whole model
teaches, images are cropped and flipped, and nobody looks at labels. "by labels": the paper's recipe. Methods with a
loss of their own keep it. Measured are the weights of the last epoch: nothing is chosen.

    python reproduce/tuning_few_images.py --model vit_tiny_patch16_224 --checkpoint WEIGHTS --data-dir imagenet \\
        --crop-pct 1.0 --budgets 0.655G --epochs 4 --json results/reproduce_vit_tiny_tuning_few_images_cpu.json

Cost: a search for each budget, unless `--schedule FILE` has one, seven trainings for each and two of the whole model.

Measured here: results/reproduce_vit_tiny_tuning_few_images_cpu.json, four epochs at 2e-5: a loss rise of 0.039 untuned,
0.040 distilled and 0.131 by labels.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from setting import Setting, Table, ended_in_a_sentence, parser, save
from setting import setting as setting_of
from torch import nn
from torch.utils.data import Subset

import diffrate
from diffrate import embedded
from diffrate.data import training_datasets
from diffrate.devices import resolve_device
from diffrate.embedded import ImageDataset
from diffrate.errors import DiffRateError
from diffrate.methods import to_train
from diffrate.models import load_model
from diffrate.training import EMBEDDED, FINETUNE, Recipe, finetune
from diffrate.training.loop import LAST
from diffrate.training.objective import Objective

PAPER = "Table 2 tunes on the 1,281,167 images of ImageNet: DeiT-S at 2.9 G from 79.58 to 79.83"
SEARCHED, WHOLE, RIVALS = "search", "uncompressed", ("tome", "evit", "evo-vit", "dynamicvit", "spvit")
NOT_TUNED, DISTILLED, LABELS = "not tuned", "distilled", "by labels"
ROWS = (
    *(f"{SEARCHED}, {how}" for how in (NOT_TUNED, DISTILLED, LABELS)),
    *(f"{name}, {DISTILLED}" for name in RIVALS),
)
PLAIN = {
    "rand_augment": 0,
    "color_jitter": 0.0,
    "erasing": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
    "smoothing": 0.0,
}
BATCH = 100
CHECKED = 20  # images that the trainer wants for choosing an epoch, which nobody looks at


@dataclass(frozen=True)
class Job:
    """One training: what a worker needs to know."""

    name: str
    how: str
    budget: float
    schedule: dict[str, Any] | None  # of the search; of the uncompressed model and of other methods, None
    recipe: Recipe
    model: str
    checkpoint: Path | None
    pretrained: bool
    data_dir: Path | None
    split: str | None
    workers: int
    device: str

    def load(self) -> nn.Module:
        if self.model == "embedded":
            return embedded.model()
        return load_model(self.model, self.checkpoint, self.pretrained)

    def under(self, model: nn.Module) -> diffrate.CompressedModel:
        """The model as it is tuned and measured."""
        if self.name in RIVALS:
            return to_train(self.name, model, self.budget)
        schedule = None if self.schedule is None else diffrate.Schedule.from_dict(self.schedule)
        return diffrate.compress(model, schedule)


def recipe_of(how: str, model: str, epochs: int, lr: float) -> Recipe:
    """The paper's, or one without labels and with few changes to the images."""
    small = {"crop_padding": EMBEDDED.crop_padding} if model == "embedded" else {}
    recipe = replace(FINETUNE, epochs=epochs, batch_size=BATCH, **small)
    if how == LABELS:
        return recipe
    return replace(recipe, **PLAIN, lr=lr, smallest_crop=0.35, distillation=1.0)


def images_of(job: Job, model: nn.Module) -> tuple[Any, Any]:
    """The search's images to train on, and a few of them as an evaluation sees them."""
    if job.model == "embedded":
        data = embedded.dataset("search")
        return data, ImageDataset(data.images[:CHECKED], data.labels[:CHECKED])
    r = job.recipe
    training, plain = training_datasets(
        model, job.data_dir, split=job.split, val_split=job.split, rand_augment=r.rand_augment,
        color_jitter=r.color_jitter, erasing=r.erasing, smallest_crop=r.smallest_crop,
    )  # fmt: skip
    return training, Subset(plain, range(CHECKED))


def tuned(job: Job, folder: str) -> tuple[Job, Path]:
    """One training; its last weights lie in `folder`."""
    torch.set_num_threads(2)
    model = job.load()
    training, checked = images_of(job, model)
    under, recipe = job.under(model), job.recipe
    if getattr(under, "objective", Objective).needs_teacher:
        recipe = replace(recipe, distillation=0.0)  # the method's own loss has the teacher's answers
    cpu = torch.device(job.device).type == "cpu"
    finetune(
        model, under, training, checked, folder, replace(recipe, precision="no" if cpu else "bf16"),
        accelerator=Accelerator(cpu=cpu, mixed_precision="no" if cpu else "bf16"), workers=job.workers, progress=False,
    )  # fmt: skip
    return job, Path(folder) / LAST


def run(setting: Setting, arguments: argparse.Namespace) -> None:
    table = Table(setting, "tuning_few_images", "Tuned on the images of the search", PAPER)
    whole = diffrate.gmacs(setting.model)
    jobs = []
    given = [diffrate.Schedule.load(file) for file in arguments.schedule]
    for budget in setting.budgets:
        near = [each for each in given if abs(diffrate.gmacs(setting.model, each) / budget - 1) < 0.01]
        schedule = near[0] if near else setting.search(budget)[0]
        table.measure(f"{SEARCHED}, {NOT_TUNED}", schedule, budget=budget)
        cost = diffrate.gmacs(setting.model, schedule)
        jobs += [job(SEARCHED, how, cost, schedule, arguments) for how in (DISTILLED, LABELS)]
        jobs += [job(name, DISTILLED, cost, None, arguments) for name in RIVALS]
    jobs += [job(WHOLE, how, whole, None, arguments) for how in (DISTILLED, LABELS)]
    with tempfile.TemporaryDirectory() as folder:
        places = [(each, str(Path(folder) / str(i))) for i, each in enumerate(jobs)]
        done = (tuned(*place) for place in places)
        pool = None
        if arguments.side_by_side > 1:
            pool = ProcessPoolExecutor(arguments.side_by_side, multiprocessing.get_context("spawn"))
            done = (each.result() for each in as_completed([pool.submit(tuned, *place) for place in places]))
        try:
            for each, weights in done:
                model = each.under(each.load()).to(setting.device)
                model.load_state_dict(load_file(weights))
                nearest = min([*setting.budgets, whole], key=lambda b, at=each.budget: abs(b - at))  # type: ignore[misc]
                table.measure(f"{each.name}, {each.how}", model, budget=nearest, epochs=each.recipe.epochs)
        finally:
            if pool is not None:
                pool.shutdown(cancel_futures=True)
    order = [f"{SEARCHED}, {NOT_TUNED}", *(f"{each.name}, {each.how}" for each in jobs)]
    table.rows.sort(key=lambda row: (-row["budget"], order.index(row["name"])))
    save(setting)


def job(
    name: str, how: str, budget: float, schedule: diffrate.Schedule | None, arguments: argparse.Namespace
) -> Job:
    a = arguments
    inside = a.val_dir is None or a.data_dir is None or (a.data_dir / a.search_split).is_dir()
    return Job(
        name, how, budget, None if schedule is None else schedule.to_dict(),
        recipe_of(how, a.model, a.epochs, a.lr), a.model, a.checkpoint, a.pretrained, a.data_dir,
        a.search_split if inside else None, a.workers, str(resolve_device(None)),
    )  # fmt: skip


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--epochs", type=int, default=20)
    flags.add_argument("--lr", type=float, default=FINETUNE.lr, help="where the whole model teaches")
    flags.add_argument(
        "--schedule",
        action="append",
        default=[],
        help="a searched schedule, in place of a search; may be repeated",
    )
    flags.add_argument("--side-by-side", type=int, default=1, help="trainings in processes of their own")
    arguments = flags.parse_args()
    if arguments.epochs < 1 or arguments.side_by_side < 1:
        raise DiffRateError("--epochs and --side-by-side are at least 1")
    run(setting_of(arguments), arguments)


if __name__ == "__main__":
    with ended_in_a_sentence():
        main()
