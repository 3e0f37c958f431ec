"""Tables 2 and "train from scratch", at the size of Fashion-MNIST: what training gives back of what compression lost.

The embedded ViT under schedules that were searched for 50 % and 35 % of its MACs: without tuning, after fine-tuning,
and trained from scratch under the same schedule, three seeds each, with the uncompressed model tuned and trained alike
as controls. Accuracies are those of the last epoch's weights (their moving average) on the 10,000 test images. The best
epoch on 3,000 training images that are kept apart is named beside it; so few images choose by luck.

Beside it other methods at the same MACs, tuned by the same recipe and their own losses, one seed each: DynamicViT and
SPViT with their trained selectors, Evo-ViT, EViT, ToMe and ATS (`--methods`).

The data lie on the device whole, and `--workers` runs share one GPU, best under CUDA's multi-process service. Each has
its cosine over all of its epochs. Rows are saved as runs end; `--resume` keeps the schedules, and all rows but those
that are asked for and had fewer epochs or ended early, which run again. On one GPU:

    python reproduce/with_training.py --data-dir /usr/share/datasets/fashion-mnist --workers 14 --compile \\
        --minutes 10 --json results/with_training_fashion_h200.json

Cost: two searches and 26 trainings of 57,000 small images an epoch: 7 tuned, 7 from scratch, 12 of other methods. On a
shared H200, ten epochs of tuning took 158 to 168 s with 7 side by side, thirty from scratch 442 to 478 s and ten of
DynamicViT, which does not compile, 304 to 313 s with 11 side by side, of ATS and SPViT 395 to 434 s beside races.

Measured here: results/with_training_fashion_h200.json, at 0.175 of 0.351 GMACs: 92.34 % without tuning, 92.67 after
it, 91.31 after thirty epochs from scratch; uncompressed 92.57, and 91.27 from scratch.

A try on a CPU: --images 256 --test-images 100 --tune-epochs 1 --epochs 1 --seeds 1 --workers 1 --search-steps 2

For the paper's own table, on ImageNet: `diffrate finetune --model deit_small_patch16_224 --pretrained
--schedule published:2.9 --data-dir imagenet --output runs/deit_small` (docs/training.md); not run here.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from off_the_shelf import costs
from safetensors.torch import load_file

import diffrate
from diffrate import embedded
from diffrate.devices import resolve_device
from diffrate.embedded import ImageDataset
from diffrate.embedded.build import training_sets
from diffrate.errors import DiffRateError
from diffrate.methods import to_train
from diffrate.methods.by_image import MEASURED_ON, decides_by_image
from diffrate.methods.policy import MethodModel
from diffrate.results import check_target, write_results
from diffrate.training import EMBEDDED, Recipe, accuracy, finetune, train
from diffrate.training.batches import validation_batches
from diffrate.training.loop import LAST

PAPER = {
    "deit_small_patch16_224": {
        "uncompressed": 79.82, "DynamicViT 2.9": 79.30, "Evo-ViT 3.0": 79.40, "EViT 3.0": 79.50, "ToMe 2.9": 79.49,
        "ATS 2.9": 79.70, "SPViT 2.6": 79.34, "DiffRate 2.9, off the shelf": 79.58, "DiffRate 2.9, tuned": 79.83,
        "DiffRate 2.3, from scratch": 79.41, "DiffRate 2.9, from scratch": 79.76,
    },
    "deit_base_patch16_224": {
        "uncompressed": 81.83, "EViT 11.5": 81.30, "ToMe 11.5": 81.41, "DiffRate 11.5, off the shelf": 81.50,
        "DiffRate 11.5, tuned": 81.71,
    },
    "vit_base_patch16_224.mae": {
        "uncompressed": 83.72, "ToMe 11.5": 82.94, "DiffRate 11.5, off the shelf": 82.91, "DiffRate 11.5, tuned": 83.25,
    },
    "vit_large_patch16_224.mae": {
        "uncompressed": 85.95, "ToMe 42.3": 85.59, "DiffRate 42.3, off the shelf": 85.56, "DiffRate 42.3, tuned": 85.71,
    },
    "vit_huge_patch14_224.mae": {
        "uncompressed": 86.88, "ToMe 103.4": 86.51, "DiffRate 103.4, off the shelf": 86.72,
    },
    "caformer_s36": {
        "uncompressed": 84.45, "DiffRate 6.0, tuned": 84.32, "DiffRate 5.6, tuned": 84.21, "DiffRate 5.2, tuned": 84.03,
    },
}  # fmt: skip
TUNED, SCRATCH = "fine-tuned", "from scratch"
WHOLE = "uncompressed, "  # before either: the control
RIVALS = ("dynamicvit", "spvit", "evo-vit", "evit", "tome", "ats")
EPOCHS = 30  # from scratch
DROP_PATH = 0.05
# From scratch as the embedded model itself was trained; tuned by the same recipe, from a learning rate at which it
# changes little by little.
TUNE = replace(EMBEDDED, epochs=10, lr=2e-4, min_lr=1e-6, warmup_epochs=1, distillation=0.5, ema_decay=0.998)


@dataclass(frozen=True)
class Job:
    """One run: what a worker needs to know."""

    kind: str
    budget: str
    method: str | None  # and how many GMACs it may cost; or a schedule
    gmacs: float
    schedule: dict[str, Any] | None
    seed: int
    recipe: Recipe
    data_dir: str
    images: int | None
    test_images: int | None
    device: str
    deadline: float  # of time.time(), which processes share


def sets(data_dir: str, images: int | None, test_images: int | None) -> tuple[ImageDataset, ...]:
    """Fashion-MNIST for training, choosing and testing, or the first images of each."""
    found = training_sets(Path(data_dir))
    limits = (images, images, test_images)
    return tuple(ImageDataset(s.images[:n], s.labels[:n]) for s, n in zip(found, limits, strict=True))


def under(method: str, model: torch.nn.Module, gmacs: float) -> MethodModel:
    """The model under a method at this cost, which ATS finds on images of its own."""
    if method != "ats":
        return to_train(method, model, gmacs)
    images = embedded.normalise(embedded.images("search")[0][:MEASURED_ON, None])
    return to_train(method, model, gmacs, images.to(next(model.parameters()).device))


def run_job(job: Job) -> dict[str, Any]:
    """One training and its accuracy on the test images."""
    torch.set_num_threads(1)
    training, validation, test = sets(job.data_dir, job.images, job.test_images)
    recipe = replace(job.recipe, seed=job.seed)
    set_seed(job.seed)
    schedule = None if job.schedule is None else diffrate.Schedule.from_dict(job.schedule)
    model = embedded.model(pretrained=not job.kind.endswith(SCRATCH), drop_path_rate=DROP_PATH)
    device = torch.device(job.device)
    options: dict[str, Any] = {
        "accelerator": Accelerator(cpu=device.type == "cpu", mixed_precision=recipe.precision),
        "max_minutes": (job.deadline - time.time()) / 60,
        "progress": False,
    }
    tested = diffrate.compress(model, schedule)  # without a schedule, nothing is removed
    if job.method is not None:
        tested = under(job.method, model, job.gmacs)
        if tested.objective.needs_teacher:
            recipe = replace(recipe, distillation=0.0)  # it distils by its own weights
    with tempfile.TemporaryDirectory() as folder:
        if job.kind.endswith(SCRATCH):
            trained = train(tested, training, validation, folder, recipe, **options)
        else:
            trained = finetune(model, tested, training, validation, folder, recipe, **options)
        tested.load_state_dict(load_file(Path(folder) / LAST))
    cost = {"gmacs": diffrate.gmacs(tested)}
    if decides_by_image(tested):  # and training has changed what it decides
        cost["gmacs"], cost["padded_gmacs"] = costs(tested.eval(), validation_batches(test, 1000, 0))
    return {
        "name": job.kind, "budget": job.budget, **cost, "seed": job.seed,
        "epochs": len(trained.history), "of_epochs": recipe.epochs, "best_epoch": trained.epoch,
        "validation_accuracy": trained.accuracy, "test_accuracy": accuracy(tested, test),
        "seconds": trained.seconds, "images_per_second": len(training) * len(trained.history) / trained.seconds,
        "losses": [epoch["loss"] for epoch in trained.history],
    }  # fmt: skip


def missing(jobs: list[Job], results: dict[str, Any]) -> list[Job]:
    """The jobs that no row answers, of as many epochs or more and to the last; the rows of these are taken out."""
    done = {
        (row["name"], row["budget"], row["seed"]): row["of_epochs"]
        for row in results["runs"]
        if row["epochs"] == row["of_epochs"]
    }
    left = {
        (job.kind, job.budget, job.seed): job
        for job in jobs
        if done.get((job.kind, job.budget, job.seed), 0) < job.recipe.epochs
    }
    results["runs"] = [
        row for row in results["runs"] if (row["name"], row["budget"], row["seed"]) not in left
    ]
    return list(left.values())


def finished(jobs: list[Job], pool: ProcessPoolExecutor | None) -> Iterator[dict[str, Any]]:
    """The jobs' rows as they come; without a pool one after the other, here."""
    if pool is None:
        yield from map(run_job, jobs)
        return
    waiting: list[Future[dict[str, Any]]] = [pool.submit(run_job, job) for job in jobs]
    for done in as_completed(waiting):
        yield done.result()


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    started = time.time()
    deadline = started + 60 * arguments.minutes
    check_target(arguments.json)
    device = resolve_device(arguments.device)
    precision = "bf16" if device.type == "cuda" else "no"
    test = sets(arguments.data_dir, arguments.images, arguments.test_images)[2]
    model = embedded.model().to(device).eval()
    results: dict[str, Any] = {
        "model": "embedded", "gmacs": diffrate.gmacs(model), "test_images": len(test), "paper": PAPER,
        "uncompressed": accuracy(model, test), "budgets": {}, "runs": [],
    }  # fmt: skip
    if not arguments.resume:
        schedules = _searched(model, arguments, device)
        for name, schedule in schedules.items():
            untuned = accuracy(diffrate.compress(model, schedule), test)
            results["budgets"][name] = {
                "gmacs": diffrate.gmacs(model, schedule), "schedule": schedule.to_dict(), "without tuning": untuned,
            }  # fmt: skip
    else:
        results |= _earlier(arguments.json)
        schedules = {
            name: diffrate.Schedule.from_dict(budget["schedule"])
            for name, budget in results["budgets"].items()
        }
    for name, budget in results["budgets"].items():
        untuned, whole = budget["without tuning"], results["uncompressed"]
        print(f"{name}: {untuned:.2f} % without tuning, {whole:.2f} % uncompressed", flush=True)

    def job(kind: str, budget: str, seed: int, recipe: Recipe, method: str | None = None) -> Job:
        schedule = schedules[budget].to_dict() if budget in schedules and method is None else None
        gmacs = diffrate.gmacs(model, schedules.get(budget))
        recipe = replace(recipe, compile=recipe.compile and method is None)
        sizes = (arguments.images, arguments.test_images)
        return Job(
            kind, budget, method, gmacs, schedule, seed, recipe, str(arguments.data_dir), *sizes, str(device),
            deadline,
        )  # fmt: skip

    here = {"precision": precision, "compile": arguments.compile}
    tune = replace(TUNE, epochs=arguments.tune_epochs, lr=arguments.tune_lr, **here)
    seeds = range(arguments.seeds)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(arguments.workers, context) if arguments.workers else None
    scratch = replace(
        EMBEDDED,
        epochs=arguments.epochs,
        warmup_epochs=min(EMBEDDED.warmup_epochs, arguments.epochs // 5),
        batch_size=min(EMBEDDED.batch_size, arguments.images or EMBEDDED.batch_size),
        **here,
    )
    results["recipes"] = results.get("recipes", {}) | {TUNED: asdict(tune)}
    if arguments.epochs:
        results["recipes"][SCRATCH] = asdict(scratch)
    try:
        tuned = [job(TUNED, budget, s, tune) for s in seeds for budget in schedules]
        rivals = [
            job(f"{method}, {TUNED}", budget, 0, tune, method)
            for method in arguments.methods.split(",")
            for budget in schedules
            if method and _reaches(method, model, schedules[budget], results)
        ]
        from_scratch = [job(WHOLE + SCRATCH, "100%", 0, scratch)]
        from_scratch += [job(SCRATCH, budget, s, scratch) for s in seeds for budget in schedules]
        longest_first = from_scratch if arguments.epochs else []
        jobs = [*longest_first, job(WHOLE + TUNED, "100%", 0, tune), *tuned, *rivals]
        for row in finished(missing(jobs, results), pool):
            results["runs"].append(row)
            print(
                f"{row['name']:26s} {row['budget']:8s} seed {row['seed']}  {row['test_accuracy']:.2f} %  "
                f"{row['epochs']} epochs, {row['seconds']:.0f} s",
                flush=True,
            )
            summarise(results)
            results["seconds"] = time.time() - started
            if arguments.json is not None:
                write_results(arguments.json, shlex.join(["python", *sys.argv]), results, device)
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    return results


def _searched(
    model: torch.nn.Module, arguments: argparse.Namespace, device: torch.device
) -> dict[str, diffrate.Schedule]:
    """A schedule for each budget, by its share of the model's MACs."""
    found = diffrate.search(
        model, embedded.dataset("search"), arguments.budgets, steps=arguments.search_steps, progress=False,
        accelerator=Accelerator(
            cpu=device.type == "cpu", mixed_precision="fp16" if device.type == "cuda" else "no"
        ),
    )  # fmt: skip
    whole = diffrate.gmacs(model)
    return {f"{100 * diffrate.gmacs(model, each) / whole:.0f}%": each for each in found.schedules}


def _earlier(file: Path | None) -> dict[str, Any]:
    """The results of a run to go on with: its schedules, and its rows."""
    if file is None or not file.is_file():
        raise DiffRateError("--resume needs --json with the file of an earlier run")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["results"]
    return {name: value for name, value in found.items() if name != "left_out"}


def _reaches(
    method: str, model: torch.nn.Module, schedule: diffrate.Schedule, results: dict[str, Any]
) -> bool:
    """Whether a method can be had at a schedule's cost; if not, the results say why."""
    try:
        under(method, model, diffrate.gmacs(model, schedule))
    except DiffRateError as error:
        results.setdefault("left_out", []).append(str(error))
        return False
    return True


def summarise(results: dict[str, Any]) -> None:
    """For each budget the mean and deviation over seeds, and the share of the loss that fine-tuning gave back."""
    for name, budget in results["budgets"].items():
        for kind in (TUNED, SCRATCH):
            found = [r["test_accuracy"] for r in results["runs"] if r["name"] == kind and r["budget"] == name]
            budget.pop(kind, None)
            if found:
                spread = statistics.stdev(found) if len(found) > 1 else None
                budget[kind] = {"mean": statistics.mean(found), "deviation": spread, "runs": len(found)}
        budget.pop("recovered", None)
        lost = results["uncompressed"] - budget["without tuning"]
        if TUNED in budget and lost > 0:
            budget["recovered"] = (budget[TUNED]["mean"] - budget["without tuning"]) / lost


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--data-dir", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    flags.add_argument("--budgets", default="50%,35%")
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--tune-epochs", type=int, default=TUNE.epochs)
    flags.add_argument("--tune-lr", type=float, default=TUNE.lr)
    flags.add_argument("--methods", default=",".join(RIVALS), help="others to tune, with commas")
    flags.add_argument("--epochs", type=int, default=EPOCHS, help="of training from scratch; 0: none")
    flags.add_argument(
        "--compile", action="store_true", help="compile the runs, except those of other methods"
    )
    flags.add_argument("--search-steps", type=int, help="steps of the search")
    flags.add_argument("--images", type=int, help="training images; all without it")
    flags.add_argument("--test-images", type=int, help="test images; all without it")
    flags.add_argument(
        "--workers", type=int, default=1, help="runs side by side, in processes of their own; 0: here"
    )
    flags.add_argument(
        "--minutes", type=float, default=6.0, help="runs end before; what was measured is saved"
    )
    flags.add_argument("--device")
    flags.add_argument("--resume", action="store_true", help="keep the schedules and runs in --json")
    flags.add_argument("--json", type=Path)
    try:
        run(flags.parse_args())
    except DiffRateError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
