"""The demonstration: search a schedule for the embedded model, and hold it against simple ones at the same MACs.

Everything is real: the search runs on the images that ship for it, every number comes from test images that neither
the training nor the search has seen, and all models run on the same batches in turn. On a machine that is busy with
other things the speeds still mean little.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from diffrate import embedded
from diffrate.backbones import backbone_of
from diffrate.baselines import constant_merging, stepwise_pruning
from diffrate.compressed import CompressedModel, compress
from diffrate.costs.macs import gmacs
from diffrate.errors import DiffRateError
from diffrate.evaluate import Comparison, Evaluation, compare_evaluations, evaluate
from diffrate.pictures import stacked, token_picture
from diffrate.results import check_target, write_results
from diffrate.schedule import Schedule
from diffrate.searching import search

BUDGET = "50%"
IMAGES = 1000  # of the 2,000 test images: what two slow cores manage in a minute
SEARCH = {"steps": 36, "batch_size": 16, "checks": 4}  # under a minute on two slow cores
BATCH_SIZE = 50
PICTURED = 6  # images in the picture
FADED = 64  # grey of a black pixel in the picture, so that pruned patches are the only black ones


@dataclass(frozen=True)
class Contender:
    """One model of the comparison, and what it did."""

    name: str
    schedule: Schedule | None
    gmacs: float
    evaluation: Evaluation
    comparison: Comparison  # with the uncompressed model, on the same images
    speedup: float  # over the uncompressed model, in the same run

    def to_dict(self) -> dict[str, Any]:
        numbers = ("top1", "top5", "loss", "images", "images_per_second")
        return {
            "name": self.name,
            "gmacs": self.gmacs,
            **{name: getattr(self.evaluation, name) for name in numbers},
            "speedup": self.speedup,
            "comparison": asdict(self.comparison),
            "schedule": None if self.schedule is None else self.schedule.to_dict(),
        }


def demo(
    output: Path,
    images: int = IMAGES,
    seed: int = 0,
    *,
    model: nn.Module | None = None,
    settings: Mapping[str, Any] = SEARCH,
    command: str = "diffrate demo",
    say: Callable[[str], None] = lambda _: None,
) -> list[Contender]:
    """Search, compare, and save schedule.json, results.json and tokens.png to `output`.

    images    test images to compare on.
    model     another model for the embedded images than the embedded one.
    settings  arguments of `diffrate.search`.
    """
    if not 1 < images <= embedded.SPLITS["test"]:
        raise DiffRateError(f"images must be between 2 and {embedded.SPLITS['test']}, not {images}")
    check_target(output / "results.json")
    whole = (embedded.model() if model is None else model).eval()
    layout, before = backbone_of(whole).layout, gmacs(whole)
    say(
        f"A vision transformer of {layout.depth} blocks, {layout.tokens} tokens and {before:.3f} GMACs, "
        "trained on Fashion-MNIST."
    )
    say(f"Searching a schedule for {BUDGET} of its MACs on {embedded.SPLITS['search']:,} images …")
    found = search(whole, embedded.dataset("search"), BUDGET, seed=seed, **settings)
    say(f"  kept tokens, block by block: {' '.join(map(str, found.schedule.merge))}  ({found.seconds:.0f} s)")

    budget = found.schedule.made["budget_gmacs"]
    schedules = {
        "uncompressed": None,
        "diffrate search": found.schedule,
        "ToMe-like merging": constant_merging(whole, budget),
        "EViT-like pruning": stepwise_pruning(whole, budget),
    }
    models = {name: whole if s is None else compress(whole, s) for name, s in schedules.items()}
    say(f"Comparing {len(models)} models on {images:,} test images …")
    evaluations = evaluate_in_turn(models, *_first(images))
    reference = evaluations["uncompressed"]
    contenders = [
        Contender(
            name,
            schedule,
            gmacs(whole, schedule),
            evaluations[name],
            compare_evaluations(evaluations[name], reference),
            evaluations[name].images_per_second / reference.images_per_second,
        )
        for name, schedule in schedules.items()
    ]
    found.schedule.save(output / "schedule.json")
    _picture(models["diffrate search"]).save(output / "tokens.png")
    results = {
        "images": images,
        "batch_size": BATCH_SIZE,
        "budget": BUDGET,
        "search": {**settings, "seed": seed, "images": embedded.SPLITS["search"], "seconds": found.seconds},
        "models": [contender.to_dict() for contender in contenders],
    }
    write_results(output / "results.json", command, results, next(whole.parameters()).device)
    return contenders


def evaluate_in_turn(
    models: Mapping[str, nn.Module], images: Tensor, labels: Tensor
) -> dict[str, Evaluation]:
    """Every model on every batch, one after the other, in an order that rotates; speeds are medians over batches."""
    names = list(models)
    device = next(models[names[0]].parameters()).device
    batches = list(zip(images.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True))
    for name in names:
        evaluate(models[name], batches[:1], device, progress=False)  # the first pass of a model warms it up
    parts: dict[str, list[Evaluation]] = {name: [] for name in names}
    console = Console(stderr=True)
    numbered = track(
        enumerate(batches),
        "Comparing",
        len(batches),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    for i, batch in numbered:
        for name in names[i % len(names) :] + names[: i % len(names)]:
            parts[name].append(evaluate(models[name], [batch], device, progress=False))
    return {name: _joined(of_model) for name, of_model in parts.items()}


def _joined(parts: Sequence[Evaluation]) -> Evaluation:
    """The evaluations of several batches as one, with the median of their speeds."""
    correct, nll = (torch.cat([getattr(part, name) for part in parts]) for name in ("correct", "nll"))
    return Evaluation(
        top1=100 * correct.double().mean().item(),
        top5=sum(part.top5 * part.images for part in parts) / len(nll),
        loss=nll.double().mean().item(),
        images=len(nll),
        images_per_second=statistics.median(part.images_per_second for part in parts),
        predicted=torch.cat([part.predicted for part in parts]),
        correct=correct,
        nll=nll,
    )


def _first(count: int) -> tuple[Tensor, Tensor]:
    """The first test images, normalised (N, 1, H, W), and labels; the classes take turns."""
    images, labels = embedded.images("test")
    return embedded.normalise(images[:count, None]), labels[:count]


def _picture(model: nn.Module) -> Image.Image:
    """What the model merges and prunes in a few test images, at each quarter of its depth and before the last block."""
    assert isinstance(model, CompressedModel)
    backbone = model.backbone
    inputs, labels = _first(PICTURED)
    inputs = inputs.to(next(model.parameters()).device)
    with torch.inference_mode():
        trace = model.trace(inputs)
    depth = backbone.layout.depth
    blocks = sorted({max(1, round(depth * share)) for share in (1 / 4, 1 / 2, 3 / 4)} | {depth - 1})
    strips = []
    for i, pixels in enumerate(embedded.images("test")[0][:PICTURED]):
        image = Image.fromarray((FADED + pixels.float() * (255 - FADED) / 255).round().byte().numpy())
        patches = {block: _patches(trace[block - 1].patches, i) for block in blocks}
        strips.append(token_picture(image, patches, backbone.grid(inputs), embedded.CLASSES[labels[i]]))
    return stacked(strips)


def _patches(patches: Tensor | None, i: int) -> Tensor:
    assert patches is not None  # a trace always has them
    return patches[i]
