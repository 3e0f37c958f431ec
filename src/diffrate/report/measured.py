"""What a report needs beyond the run folder, measured on images and kept there: accuracy, speed, and token maps.

The searched schedules and known methods run on the same images as the uncompressed model. What changed most, by class
and by image, is picked out, and a few images are followed through the blocks for the token explorer.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from diffrate.compressed import CompressedModel, compress
from diffrate.contenders import Contender, contend
from diffrate.costs.macs import gmacs
from diffrate.devices import autocast
from diffrate.digest import is_whole, signed
from diffrate.errors import DiffRateError
from diffrate.evaluate import Evaluation
from diffrate.methods import METHODS, build
from diffrate.modes import evaluating
from diffrate.outputs import main_output
from diffrate.pictures import edges
from diffrate.report.run import MEASURED, Run
from diffrate.results import write_results
from diffrate.schedule import Schedule
from diffrate.token_maps import TokenMap, token_maps

VERSION = 1  # of what is kept
WHOLE = "uncompressed"
SEARCHED = "diffrate search"
BASELINES = ("tome", "evit")
EXPLORED = 12  # images in the token explorer
AT_ONCE = 8
SMALL = 96  # pixels: below, an image is kept to the last bit


@dataclass(frozen=True)
class Shown:
    """How images and classes are to be named and shown.

    mean, std  of the images' normalisation.
    classes    a name for each class index.
    name       of the image at a place in the loader.
    """

    mean: Sequence[float]
    std: Sequence[float]
    classes: Sequence[str]
    name: Callable[[int], str] = lambda i: f"image {i}"


def measure(
    run: Run,
    model: nn.Module,
    loader: Iterable[Any],
    shown: Shown,
    methods: Sequence[str] = BASELINES,
    explored: int = EXPLORED,
    device: str | torch.device = "cpu",
    amp: bool = False,
    amp_dtype: str = "float16",
    asked: Mapping[str, Any] | None = None,
    command: str = "diffrate.report.measure",
) -> None:
    """Measure the run's schedules, and `methods` at the cost of the tightest, and keep it in the run folder.

    loader  batches of images and labels, always in the same order: it is read twice.
    asked   what the caller's user asked for; `is_measured` compares it.
    """
    for name in methods:
        if name not in METHODS:
            raise DiffRateError(f"there is no method {name!r}: `diffrate methods` lists {', '.join(METHODS)}")
    model.to(torch.device(device))
    models: dict[str, nn.Module] = {WHOLE: model}
    names = [searched_name(schedule, run.schedules) for schedule in run.schedules]
    models.update({name: compress(model, s) for name, s in zip(names, run.schedules, strict=True)})
    left_out = []
    for name in methods:
        try:
            models[name] = build(name, model, gmacs(model, run.schedule))
        except DiffRateError as error:
            left_out.append(f"{name}: {error}")
    contenders = contend(models, loader, device, amp, amp_dtype)
    whole, result = contenders[0].evaluation, contenders[len(names)].evaluation
    changed, others = chosen_images(whole, result, explored)
    chosen = _images_at(loader, [*changed, *others])
    found = models[names[-1]]
    assert isinstance(found, CompressedModel)
    results = {
        **summary(contenders, names, shown.classes),
        "left_out": left_out,
        "pictures": pictures(
            found, chosen, changed, whole, result, shown, torch.device(device), amp, amp_dtype
        ),
    }
    save(run.folder, run.schedules, results, asked or {}, command, torch.device(device))


def save(
    folder: Path,
    schedules: Sequence[Schedule],
    results: Mapping[str, Any],
    asked: Mapping[str, Any],
    command: str,
    device: torch.device,
) -> None:
    """Keep what was measured, with the schedules it is about."""
    about = {"version": VERSION, "schedules": _identities(schedules), "asked": json.loads(json.dumps(asked))}
    write_results(folder / MEASURED, command, signed({**results, **about}), device)


def is_measured(run: Run, asked: Mapping[str, Any] | None = None) -> bool:
    """Whether the folder's measurements are of its present schedules and, where given, as `asked`."""
    results = run.measured.get("results")
    if not isinstance(results, dict) or results.get("version") != VERSION:
        return False
    if not is_whole(results):
        raise DiffRateError(f"{run.folder / MEASURED} is damaged: delete it, and measure again")
    if results.get("schedules") != _identities(run.schedules):
        return False
    return asked is None or results.get("asked") == json.loads(json.dumps(asked))


def _identities(schedules: Sequence[Schedule]) -> list[Any]:
    return [
        {name: schedule.to_dict()[name] for name in ("prune", "merge", "operator")} for schedule in schedules
    ]


def searched_name(schedule: Schedule, among: Sequence[Schedule]) -> str:
    """What a row of the folder's schedules is called: of several, by its budget."""
    name = SEARCHED if "search" in str(schedule.made.get("by", "search")) else "this schedule"
    if len(among) == 1:
        return name
    return f"{name}, {schedule.made.get('budget') or among.index(schedule) + 1}"


def summary(contenders: Sequence[Contender], found: Sequence[str], classes: Sequence[str]) -> dict[str, Any]:
    """The models' numbers, and what became of each class.

    found  names of the contenders that run the searched schedules; the last of them is the result.
    """
    result = next(contender for contender in contenders if contender.name == found[-1])
    whole, mine = contenders[0].evaluation, result.evaluation
    by_class = []
    for index in whole.labels.unique().tolist():
        of_class = whole.labels == index
        by_class.append(
            {
                "name": classes[index],
                "images": int(of_class.sum()),
                "before": int(whole.correct[of_class].sum()),
                "after": int(mine.correct[of_class].sum()),
                "loss_rise": float((mine.nll - whole.nll)[of_class].double().mean()),
            }
        )
    return {
        "found": list(found),
        "models": [contender.to_dict() for contender in contenders],
        "classes": by_class,
    }


def chosen_images(whole: Evaluation, found: Evaluation, count: int) -> tuple[list[int], list[int]]:
    """Places of the images whose loss changed most, and of as many others, evenly spread."""
    change = (found.nll - whole.nll).abs()
    changed = change.argsort(descending=True, stable=True)[: (count + 1) // 2].tolist()
    others = [i for i in range(len(change)) if i not in set(changed)]
    step = torch.linspace(0, len(others) - 1, min(count // 2, len(others))).round().long().tolist()
    return changed, [others[i] for i in step]


def pictures(
    model: CompressedModel,
    images: Mapping[int, Tensor],
    changed: Sequence[int],
    whole: Evaluation,
    found: Evaluation,
    shown: Shown,
    device: torch.device,
    amp: bool = False,
    amp_dtype: str = "float16",
) -> list[dict[str, Any]]:
    """What the page shows of each image: itself, both models' answers, and its tokens block by block."""
    places, made = list(images), []
    for start in range(0, len(places), AT_ONCE):
        some = places[start : start + AT_ONCE]
        inputs = torch.stack([images[i] for i in some]).to(device)
        with evaluating(model), torch.inference_mode(), autocast(device, amp, amp_dtype):
            before, after = (
                main_output(each(inputs)).float().softmax(-1).cpu() for each in (model.original, model)
            )
        for row, (i, image) in enumerate(
            zip(some, token_maps(model, inputs, shown.mean, shown.std), strict=True)
        ):
            made.append(
                {
                    "name": shown.name(i),
                    "label": shown.classes[int(whole.labels[i])],
                    "before": _answer(before[row], int(whole.predicted[i]), shown.classes, whole, i),
                    "after": _answer(after[row], int(found.predicted[i]), shown.classes, found, i),
                    "changed": i in changed,
                    **picture(image),
                }
            )
    return made


def _answer(shares: Tensor, predicted: int, classes: Sequence[str], of: Evaluation, i: int) -> dict[str, Any]:
    return {
        "class": classes[predicted],
        "share": float(shares[predicted]),
        "correct": bool(of.correct[i]),
        "loss": float(of.nll[i]),
    }


def picture(image: TokenMap) -> dict[str, Any]:
    """One image and its tokens, small enough for a page: bytes as a data address, token numbers and masses as text."""
    rows, columns = image.grid
    height, width = image.pixels.shape[:2]
    return {
        "image": _data_address(image.pixels),
        "size": [height, width],
        "grid": [rows, columns],
        "colours": _mean_colours(image),
        "blocks": [
            {"tokens": " ".join(map(str, tokens.flatten())), "mass": " ".join(f"{m:.4g}" for m in mass)}
            for tokens, mass in zip(image.tokens, image.mass, strict=True)
        ],
    }


def _mean_colours(image: TokenMap) -> str:
    """Six hexadecimal digits a patch, in a row: from them a page mixes the colour of every token."""
    down, along = (edges(n, parts) for n, parts in zip(image.pixels.shape[:2], image.grid, strict=True))
    sums = np.add.reduceat(np.add.reduceat(image.pixels.astype(float), down[:-1], axis=0), along[:-1], axis=1)
    means = sums / (np.diff(down)[:, None, None] * np.diff(along)[None, :, None])
    return bytes(means.round().astype(np.uint8).flatten()).hex()


def _data_address(pixels: np.ndarray) -> str:
    form = "png" if max(pixels.shape[:2]) <= SMALL else "webp"
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **({} if form == "png" else {"quality": 85}))
    return f"data:image/{form};base64,{base64.b64encode(file.getvalue()).decode()}"


def _images_at(loader: Iterable[Any], places: Sequence[int]) -> dict[int, Tensor]:
    """The images (C, H, W) at some places of a loader, in the order of `places`."""
    wanted, found, start = set(places), {}, 0
    for images, _ in loader:
        found.update({i: images[i - start].cpu() for i in wanted if start <= i < start + len(images)})
        start += len(images)
        if len(found) == len(wanted):
            break
    return {i: found[i] for i in places}
