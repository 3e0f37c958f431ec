"""The demonstration: search a schedule for the embedded model, and hold it against ToMe and EViT at the same MACs.

Everything is real: the search runs on the images that ship for it, every number comes from test images that neither
the training nor the search has seen, and all models run on the same batches in turn. On a machine that is busy with
other things the speeds still mean little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor, nn

from diffrate import embedded
from diffrate.backbones import backbone_of
from diffrate.compressed import CompressedModel, compress
from diffrate.costs.macs import gmacs
from diffrate.errors import DiffRateError
from diffrate.evaluate import Comparison, Evaluation, compare_evaluations, evaluate_in_turn
from diffrate.methods import build, settings_of
from diffrate.pictures import quarters, stacked, strip
from diffrate.results import check_target, write_results
from diffrate.searching import search
from diffrate.token_maps import token_maps

BUDGET = "50%"
IMAGES = 1000  # of the 2,000 test images: what two slow cores manage in a minute
SEARCH = {"steps": 36, "batch_size": 16, "checks": 4}  # under a minute on two slow cores
BATCH_SIZE = 50
PICTURED = 6  # images in the picture


@dataclass(frozen=True)
class Contender:
    """One model of the comparison, and what it did."""

    name: str
    settings: dict[str, Any]  # its schedule, or a method's own parameters; empty for the uncompressed model
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
            **self.settings,
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
    models = {
        "uncompressed": whole,
        "diffrate search": compress(whole, found.schedule),
        "ToMe": build("tome", whole, budget),
        "EViT": build("evit", whole, budget),
    }
    say(f"Comparing {len(models)} models on {images:,} test images …")
    evaluations = evaluate_in_turn(models, _batches(images), next(whole.parameters()).device)
    reference = evaluations["uncompressed"]
    contenders = [
        Contender(
            name,
            settings_of(model),
            gmacs(model),
            evaluations[name],
            compare_evaluations(evaluations[name], reference),
            evaluations[name].images_per_second / reference.images_per_second,
        )
        for name, model in models.items()
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


def _batches(count: int) -> list[tuple[Tensor, Tensor]]:
    images, labels = _first(count)
    return list(zip(images.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True))


def _first(count: int) -> tuple[Tensor, Tensor]:
    """The first test images, normalised (N, 1, H, W), and labels; the classes take turns."""
    images, labels = embedded.images("test")
    return embedded.normalise(images[:count, None]), labels[:count]


def _picture(model: nn.Module) -> Image.Image:
    """What the model merges and prunes in a few test images, at each quarter of its depth and before the last block."""
    assert isinstance(model, CompressedModel)
    inputs, labels = _first(PICTURED)
    maps = token_maps(model, inputs, (embedded.MEAN,), (embedded.STD,))
    return stacked(
        [
            strip(image, quarters(image.depth), embedded.CLASSES[label])
            for image, label in zip(maps, labels, strict=True)
        ]
    )
