"""The demonstration: search a schedule for the embedded model, and hold it against ToMe and EViT at the same MACs.

Everything is real: the search runs on the images that ship for it, every number comes from test images that neither
the training nor the search has seen, and all models run on the same batches in turn. On a machine that is busy with
other things the speeds still mean little.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor, nn

from diffrate import embedded
from diffrate.backbones import backbone_of
from diffrate.compressed import CompressedModel, compress
from diffrate.contenders import Contender, contend
from diffrate.costs.macs import gmacs
from diffrate.errors import DiffRateError
from diffrate.methods import build
from diffrate.pictures import quarters, stacked, strip
from diffrate.report import measured, write_report
from diffrate.results import check_target, write_results
from diffrate.schedule import write_bytes
from diffrate.searching import search
from diffrate.token_maps import token_maps

BUDGET = "50%"
IMAGES = 1000  # of the 2,000 test images: what two slow cores manage in a minute
SEARCH = {"steps": 36, "batch_size": 16, "checks": 4}  # under a minute on two slow cores
BATCH_SIZE = 50
PICTURED = 6  # images in the picture


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
    """Search, compare, and save the run folder of the search, results.json, tokens.png and report.html to `output`.

    images    test images to compare on.
    model     another model for the embedded images than the embedded one.
    settings  arguments of `diffrate.search`.
    """
    if not 1 < images <= embedded.SPLITS["test"]:
        raise DiffRateError(f"images must be between 2 and {embedded.SPLITS['test']}, not {images}")
    check_target(output / "results.json")
    _clear(output)
    whole = (embedded.model() if model is None else model).eval()
    layout, before = backbone_of(whole).layout, gmacs(whole)
    say(
        f"A vision transformer of {layout.depth} blocks, {layout.tokens} tokens and {before:.3f} GMACs, "
        "trained on Fashion-MNIST."
    )
    say(f"Searching a schedule for {BUDGET} of its MACs on {embedded.SPLITS['search']:,} images …")
    found = search(
        whole,
        embedded.dataset("search"),
        BUDGET,
        seed=seed,
        output=output,
        name=embedded.NAME,
        command=command,
        **settings,
    )
    say(f"  kept tokens, block by block: {' '.join(map(str, found.schedule.merge))}  ({found.seconds:.0f} s)")

    budget = found.schedule.made["budget_gmacs"]
    models = {
        "uncompressed": whole,
        "diffrate search": compress(whole, found.schedule),
        "ToMe": build("tome", whole, budget),
        "EViT": build("evit", whole, budget),
    }
    say(f"Comparing {len(models)} models on {images:,} test images …")
    device = next(whole.parameters()).device
    contenders = contend(models, _batches(images), device)
    _picture(models["diffrate search"]).save(content := io.BytesIO(), "png")
    write_bytes(output / "tokens.png", content.getvalue())
    results = {
        "images": images,
        "batch_size": BATCH_SIZE,
        "budget": BUDGET,
        "search": {**settings, "seed": seed, "images": embedded.SPLITS["search"], "seconds": found.seconds},
        "models": [contender.to_dict() for contender in contenders],
    }
    write_results(output / "results.json", command, results, device)
    _measured(output, models["diffrate search"], contenders, command)
    write_report(output, command=command)
    return contenders


def _clear(output: Path) -> None:
    """Make room for this run where an earlier demo was; DiffRateError where somebody else's search is."""
    try:
        config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        config = None
    if not isinstance(config, dict) or config.get("model") != embedded.NAME:
        raise DiffRateError(f"{output} holds a search that is not the demo's: choose another folder")
    for name in ("config.json", "state.json", measured.MEASURED):
        (output / name).unlink(missing_ok=True)


def _measured(output: Path, model: nn.Module, contenders: list[Contender], command: str) -> None:
    """Keep what was compared, with images for the token explorer, where the report finds it."""
    assert isinstance(model, CompressedModel)
    whole, result = contenders[0], contenders[1]
    device = next(model.parameters()).device
    changed, others = measured.chosen_images(whole.evaluation, result.evaluation, measured.EXPLORED)
    inputs, _ = _first(whole.evaluation.images)
    shown = measured.Shown((embedded.MEAN,), (embedded.STD,), embedded.CLASSES, lambda i: f"test image {i}")
    results = {
        **measured.summary(contenders, [result.name], embedded.CLASSES),
        "pictures": measured.pictures(
            model,
            {i: inputs[i] for i in [*changed, *others]},
            changed,
            whole.evaluation,
            result.evaluation,
            shown,
            device,
        ),
    }
    asked = {"data": "the embedded test images", "images": whole.evaluation.images}
    measured.save(output, [model.schedule], results, asked, command, device)


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
