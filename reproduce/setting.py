"""What every file here shares: the model and images under test, the flags that choose them, and rows that are saved.

Without flags, the embedded model and its images: everything runs on a CPU. With `--val-dir`, a folder of the files of
Fashion-MNIST (Debian's `dataset-fashion-mnist`), it is measured on all 10,000 test images instead of 2,000. With
`--model`, `--checkpoint` (or `--pretrained`) and `--data-dir`, a timm model on a folder with `search/` and `val/`.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Subset

import diffrate
from diffrate import embedded
from diffrate.data import build_loader, search_datasets
from diffrate.embedded.build import read_fashion_mnist
from diffrate.errors import DiffRateError
from diffrate.evaluate import Evaluation, compare_evaluations, evaluate
from diffrate.methods import cost_of, settings_of
from diffrate.models import load_model
from diffrate.operator import Operator
from diffrate.results import check_target, write_results
from diffrate.searching.budget import parse_gmacs

BATCH = 250


class OutOfTimeError(Exception):
    """The time that was given is over: what was measured is saved, the rest is left out."""


@dataclass
class Setting:
    """The model under test, its images, and what was measured so far."""

    name: str
    model: nn.Module
    val: list[tuple[Tensor, Tensor]]
    search_data: tuple[Any, Any]
    accelerator: Accelerator
    budgets: list[float]
    steps: int | None
    search_batch: int | None
    workers: int
    json: Path | None
    deadline: float = float("inf")
    started: float = field(default_factory=time.monotonic)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    _whole: Evaluation | None = None
    _searched: dict[tuple[Any, ...], tuple[diffrate.Schedule, float]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def whole(self) -> Evaluation:
        """The uncompressed model on the validation images."""
        if self._whole is None:
            self._whole = self.evaluated(self.model)
        return self._whole

    def evaluated(self, model: nn.Module) -> Evaluation:
        self.check_time()
        return evaluate(model, self.val, self.device, amp=self.device.type == "cuda", progress=False)

    def seconds(self) -> float:
        """Since the start, the reading of images left out."""
        return time.monotonic() - self.started

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTimeError

    def search(
        self,
        budget: float,
        seed: int = 0,
        steps: int | None = None,
        images: int | None = None,
        operator: Operator | None = None,
    ) -> tuple[diffrate.Schedule, float]:
        """A searched schedule and the seconds it took; the same search runs once."""
        key = (budget, seed, steps, images, operator)
        if key not in self._searched:
            self.check_time()
            data = self.search_data
            if images is not None:
                chosen = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(seed))[:images]
                data = tuple(Subset(part, chosen.tolist()) for part in data)  # type: ignore[assignment]
            found = diffrate.search(
                self.model, data, budget, seed=seed, steps=steps or self.steps, batch_size=self.search_batch,
                operator=operator, accelerator=self.accelerator, workers=self.workers, progress=False,
            )  # fmt: skip
            self._searched[key] = found.schedule, found.seconds
        return self._searched[key]


class Table:
    """Rows of one table or figure: printed, and saved with the paper's numbers after each."""

    def __init__(self, setting: Setting, name: str, title: str, paper: Any) -> None:
        self.setting, self.rows = setting, []
        setting.tables[name] = {"title": title, "paper": paper, "rows": self.rows}
        print(f"\n== {title}", flush=True)

    def add(self, name: str, **values: Any) -> None:
        row = {"name": name, **values}
        self.rows.append(row)
        print(_line(row), flush=True)
        save(self.setting)

    def measure(
        self,
        name: str,
        model: nn.Module | diffrate.Schedule,
        gmacs: float | None = None,
        settings: bool = True,
        **more: Any,
    ) -> Evaluation:
        """Evaluate a model or schedule and add its row: cost, accuracy, paired difference to the whole model."""
        if isinstance(model, diffrate.Schedule):
            model = diffrate.compress(self.setting.model, model)
        result = self.setting.evaluated(model)
        c = compare_evaluations(result, self.setting.whole)
        self.add(
            name,
            gmacs=cost_of(model) if gmacs is None else gmacs,
            top1=result.top1,
            points=c.top1_difference,
            points_interval=c.top1_interval,
            loss_rise=c.loss_difference,
            loss_interval=c.loss_interval,
            mcnemar_p=c.mcnemar_p,
            **more,
            **({"settings": settings_of(model)} if settings else {}),
        )
        return result


def save(setting: Setting) -> None:
    if setting.json is None:
        return
    whole = setting.whole
    results = {
        "model": setting.name,
        "gmacs": diffrate.gmacs(setting.model),
        "uncompressed": {"top1": whole.top1, "loss": whole.loss, "images": whole.images},
        "tables": setting.tables,
    }
    write_results(setting.json, shlex.join(["python", *sys.argv]), results, setting.device)


def rows_in(file: Path, *keys: str) -> list[dict[str, Any]]:
    """The rows of a table in a file of results: under `keys`, each within the one before."""
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))["results"]
        for key in (*keys, "rows"):
            found = found[key]
        return list(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        table = keys[-1] if keys else "results"
        raise DiffRateError(f"cannot read the rows of {table} in {file}: {error}") from error


def searched_at(file: Path, rows: Sequence[dict[str, Any]], budget: float) -> diffrate.Schedule:
    """What the search of an earlier table found at a budget, among the rows of its file."""
    for row in rows:
        if row["name"] == "search" and math.isclose(row["budget"], budget, rel_tol=1e-6):
            return diffrate.Schedule.from_dict(row["settings"]["schedule"])
    raise DiffRateError(f"{file} has no search at {budget:g} GMACs")


def parser(doc: str | None) -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", default="embedded", help="timm name; the embedded model without it")
    flags.add_argument("--checkpoint", type=Path, help="weights of the model")
    flags.add_argument("--pretrained", action="store_true", help="download timm's weights")
    flags.add_argument("--data-dir", type=Path, help="folder with search/ (or train/) and val/")
    flags.add_argument(
        "--val-dir",
        type=Path,
        help="folder of the images to measure on, if it is not in --data-dir; of Fashion-MNIST for the embedded model",
    )
    flags.add_argument("--search-split", default="search", help="folder of the images to search on")
    flags.add_argument("--val-split", default="val", help="folder of the images to measure on")
    flags.add_argument(
        "--crop-pct", type=float, help="of the validation images; 1.0 if they are cropped already"
    )
    flags.add_argument("--images", type=int, help="validation images, evenly spread; all without it")
    flags.add_argument("--budgets", default="80%,65%,52%", help="GMACs or shares: 0.81G,52%%")
    flags.add_argument("--steps", type=int, help="steps of a search")
    flags.add_argument("--search-batch", type=int, help="images a step of a search")
    flags.add_argument("--workers", type=int, default=2)
    flags.add_argument("--minutes", type=float, help="stop after these; what was measured is saved")
    flags.add_argument("--json", type=Path, help="write the rows here, after each")
    return flags


def setting(arguments: argparse.Namespace) -> Setting:
    check_target(arguments.json)
    started = time.monotonic()
    gpu = torch.cuda.is_available()
    accelerator = Accelerator(mixed_precision="fp16" if gpu else "no")
    if arguments.model == "embedded":
        model: nn.Module = embedded.model()
        val = _embedded_batches(arguments.val_dir, arguments.images)
        data = embedded.dataset("search")
        search_data: tuple[Any, Any] = (data, data)
    else:
        if arguments.data_dir is None:
            raise DiffRateError("give --data-dir, a folder with search/ and val/ images")
        model = load_model(arguments.model, arguments.checkpoint, arguments.pretrained)
        val = _folder_batches(model, arguments)
        searched = arguments.search_split
        inside = arguments.val_dir is None or (arguments.data_dir / searched).is_dir()
        search_data = search_datasets(model, arguments.data_dir, split=searched if inside else None)
    model.to(accelerator.device).eval()
    val = [(images.to(accelerator.device), labels.to(accelerator.device)) for images, labels in val]
    budgets = parse_gmacs(arguments.budgets, diffrate.gmacs(model))
    made = Setting(
        arguments.model, model, val, search_data, accelerator,
        budgets, arguments.steps, arguments.search_batch,
        arguments.workers, arguments.json,
        float("inf") if arguments.minutes is None else started + 60 * arguments.minutes,
    )  # fmt: skip
    whole = made.whole
    print(
        f"{made.name}: {diffrate.gmacs(model):.4f} GMACs, top-1 {whole.top1:.2f}, loss {whole.loss:.4f} "
        f"on {whole.images} images ({made.device})",
        flush=True,
    )
    return made


def main(doc: str | None, *runs: Callable[[Setting], None]) -> None:
    """Run the experiments of one file with the flags above."""
    with ended_in_a_sentence():
        made = setting(parser(doc).parse_args())
        for run in runs:
            run(made)


@contextmanager
def ended_in_a_sentence() -> Iterator[None]:
    """What time ends, and what cannot be run as it was asked for, says so and has no traceback."""
    try:
        yield
    except OutOfTimeError:
        print("out of time: the rows so far are saved")
    except DiffRateError as error:
        sys.exit(f"Error: {error}")


def without_images(
    doc: str | None, name: str, title: str, paper: Any, rows: Iterable[dict[str, Any]]
) -> None:
    """Print the rows of a table that needs no model, and save them where --json says."""
    flags = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--json", type=Path, help="write the rows here")
    arguments = flags.parse_args()
    try:
        check_target(arguments.json)
        rows = list(rows)
        for row in rows:
            print(_line(row), flush=True)
        if arguments.json is not None:
            results = {"tables": {name: {"title": title, "paper": paper, "rows": rows}}}
            write_results(arguments.json, shlex.join(["python", *sys.argv]), results)
    except DiffRateError as error:
        sys.exit(f"Error: {error}")


def _embedded_batches(source: Path | None, count: int | None) -> list[tuple[Tensor, Tensor]]:
    images, labels = embedded.images("test") if source is None else read_fashion_mnist(source, "test")
    chosen = _spread(len(labels), count)
    images, labels = embedded.normalise(images[chosen, None]), labels[chosen]
    return list(zip(images.split(BATCH), labels.split(BATCH), strict=True))


def _folder_batches(model: nn.Module, arguments: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    alone = arguments.val_dir is not None
    loader = build_loader(
        model, arguments.val_dir if alone else arguments.data_dir, split=None if alone else arguments.val_split,
        batch_size=BATCH, workers=arguments.workers, crop_pct=arguments.crop_pct,
    )  # fmt: skip
    batches = [(images, labels) for images, labels in loader]
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    chosen = _spread(len(labels), arguments.images)
    return list(zip(images[chosen].split(BATCH), labels[chosen].split(BATCH), strict=True))


def _spread(total: int, count: int | None) -> Tensor:
    """Indices of `count` images of `total`, evenly spread, so that every class has its share."""
    if count is None or count >= total:
        return torch.arange(total)
    return torch.linspace(0, total - 1, count).round().long()


def _line(row: dict[str, Any]) -> str:
    values = (f"{key} {_shown(value)}" for key, value in row.items() if key not in ("name", "settings"))
    return f"{row['name']:34s} {'  '.join(values)}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return str(value)
