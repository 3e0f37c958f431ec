"""Which tables and figures of the paper were run here, on which models and at which budgets, and what is missing.

What a table should have is what its file would write today, on both models and at three budgets where the file takes
several: a run that ended early, by itself or by hand, and one from before a row was added, are "in part".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ablations_searched
import beginnings
import calibration
import equal_time
import improvements
import last_block
import markdown_table
import operation_order
import operator_choice
import optimisation_time
import overhead
import schedules_table
import sorting_metric
import temperatures
import tuning_few_images
import with_training
from number_of_images import COUNTS
from schedule_comparison import RANDOM

from diffrate import published
from diffrate.methods import METHODS

BOTH = ("embedded", "vit_tiny_patch16_224")
SEARCH_IMAGES = 1000  # of both
DEPTH, TOKENS = 12, 197  # of both


@dataclass(frozen=True)
class Experiment:
    """A table or figure: its file here, and where its results lie."""

    name: str
    file: str
    key: str  # a table in reproduce_*.json, or files by their names
    models: tuple[str, ...] = ()  # on which it should be run
    rows: tuple[str, ...] = ()  # that it should have, at each budget
    budgets: int = 1
    on: str = ""  # the model, where the files do not name it
    accuracy: bool = False  # whether the rows of its files should have one
    remark: str = ""  # what a reader of its rows must know


EXPERIMENTS = (
    Experiment(
        "Table 1, off the shelf", "off_the_shelf.py", "off_the_shelf",
        (*BOTH, "DeiT and MAE models, ImageNet"), tuple(METHODS), 3,
    ),
    Experiment("Table 1, LV-ViT-S", "off_the_shelf.py --model lvvit_s", "reproduce_lvvit*", ("LV-ViT-S, ImageNet",)),
    Experiment(
        "beyond the paper: Table 1 at equal terms in the last block", "last_block.py", "last_block", BOTH,
        ("search", *last_block.RIVALS), 3,
        remark="No method is charged for the MLP of its last block on tokens that the head does not read; what they "
        "may spend before that is as much more than in Table 1. GMACs are without it.",
    ),
    Experiment(
        "beyond the paper: searches in milliseconds and the paper's schedules at equal time", "equal_time.py",
        "equal_time", BOTH[1:], equal_time.ROWS,
        remark="For the times of searches in MACs, and two more: searches in milliseconds, and the paper's schedules "
        "at the MACs at which a measured table says that they take as long. All were timed in one run.",
    ),
    Experiment(
        "Table 2, with training, and from scratch", "with_training.py", "with_training_*",
        ("DeiT and MAE models, ImageNet",),
        (
            with_training.WHOLE + with_training.TUNED, with_training.TUNED, with_training.WHOLE + with_training.SCRATCH,
            with_training.SCRATCH, *(f"{name}, {with_training.TUNED}" for name in with_training.RIVALS),
        ),
    ),
    Experiment(
        "Table 2, with no more images than a search", "tuning_few_images.py", "tuning_few_images",
        (BOTH[1],), tuning_few_images.ROWS,
        remark="Tuned on the thousand images of the search: distilled, the whole model teaches and labels are not "
        "looked at; by labels is the paper's recipe. DynamicViT, SPViT and Evo-ViT keep their own losses; at "
        "that commit SPViT had DynamicViT's loss of shares.",
    ),
    Experiment("Training speed", "training_speed.py", "training_speed_*"),
    Experiment("Table 3, several constraints", "hardware_table.py", "hardware_*", accuracy=True),
    Experiment(
        "Ablation, sorting metric", "sorting_metric.py", "sorting_metric", BOTH, tuple(sorting_metric.PAPER), 3,
        remark="At the paper's counts for a model of this shape; below, searched for each metric, as in the paper.",
    ),
    Experiment(
        "Ablation, compression module", "operation_order.py", "operation_order", BOTH,
        (*operation_order.PAPER, *operation_order.MORE), 3,
        remark="At the paper's counts for a model of this shape; below, searched for each operation, as in the paper.",
    ),
    Experiment(
        "Ablation, sorting metric, searched for each", "ablations_searched.py", "sorting_metric_searched", BOTH,
        tuple(ablations_searched.METRICS),
        remark="Merging and pruning under the paper's operator but for the metric; s: seconds of the search, beside "
        "other work on two cores.",
    ),
    Experiment(
        "Ablation, compression module, searched for each", "ablations_searched.py", "operation_order_searched", BOTH,
        tuple(ablations_searched.OPERATIONS),
        remark="Under the paper's operator but for the operation; s: seconds of the search, beside other work on two "
        "cores.",
    ),
    Experiment(
        "Ablation, number of images", "number_of_images.py", "number_of_images", BOTH,
        tuple(f"{count} images" for count in COUNTS if count <= SEARCH_IMAGES),
        remark="One seed, at the tightest of three budgets; s: seconds of the search.",
    ),
    Experiment(
        "Ablation, optimisation time", "optimisation_time.py", "optimisation_time", BOTH,
        tuple(f"{steps} steps" for steps in optimisation_time.STEPS),
        remark="One seed, at the tightest of three budgets; s: seconds of the search, which other work on the same GPU "
        "makes longer.",
    ),
    Experiment(
        "Figure, 10,000 random schedules", "schedule_comparison.py", "schedule_comparison", BOTH,
        ("search", "the race by loss", "the race by divergence"), 3,
        remark="The paper has three panels: pruning, merging, and both. Searches here merge; pruning alone, and both "
        "under the paper's operator were run on the embedded model. Who is ahead by chance on given images is another "
        "one on their mirror images: by the mean of both views of each image ViT-Ti was raced at two budgets, at 1.0 "
        "GMACs among 2,000 random schedules.",
    ),
    Experiment(
        "Figure, schedule transfer", "transfer.py", "transfer", BOTH,
        ("its own", *(f"from {f.name}" for f in published.FAMILIES if (f.depth, f.tokens) == (DEPTH, TOKENS))), 3,
    ),
    Experiment("Figures 1 and 5, what is pruned and merged", "visualisation.py", "visualisation_*"),
    Experiment(
        "Table, published schedules", "schedules_table.py", "schedules",
        rows=tuple(schedules_table.name(row["family"], row["gmacs"]) for row in published.table()),
    ),
    Experiment("Overhead", "overhead.py", "overhead", rows=(overhead.FORMULAS, *overhead.MODELS)),
    Experiment(
        "CAFormer-S36", "off_the_shelf.py --model caformer_s36", "reproduce_caformer*", ("CAFormer-S36, ImageNet",)
    ),
    Experiment(
        "Segmentation", "`diffrate segment`", "segmentation_*", ("CAFormer-S36, ADE20k: the paper's",),
        on="ViT-Ti, CamVid",
    ),
    Experiment(
        "beyond the paper: the operator's options", "improvements.py", "improvements", BOTH,
        tuple(improvements.VARIANTS), 3,
    ),
    Experiment(
        "beyond the paper: how surely the operator is chosen", "operator_choice.py", "operator_choice", BOTH,
        tuple(f"seed {seed}" for seed in range(operator_choice.SEEDS)), 3,
        remark="By how many standard errors the operator with a floor is better on held-out images, with answers at "
        "the temperatures 1 to 4; above 1 a search takes it. The embedded model needs it and ViT-Ti does not.",
    ),
    Experiment(
        "beyond the paper: softened answers", "temperatures.py", "temperatures", BOTH,
        tuple(f"temperature {t:g}" for t in temperatures.TEMPERATURES), 2,
    ),
    Experiment(
        "beyond the paper: where a search begins", "beginnings.py", "beginnings", BOTH,
        (*beginnings.BEGINNINGS, *(name + beginnings.BEFORE for name in beginnings.BEGINNINGS)), 2,
    ),
    Experiment(
        "beyond the paper: how right the whole model's probabilities are", "calibration.py", "calibration", BOTH,
        calibration.ROWS,
        remark="The loss that the whole model expects of itself beside the one that it has, and the temperature by "
        "which its answers would have to be softened for the least loss.",
    ),
    Experiment("beyond the paper: seeds of the search", "little_data.py", "search_vit_tiny_h200", on=BOTH[1]),
    Experiment("beyond the paper: milliseconds", "milliseconds.py", "milliseconds_*"),
    Experiment("beyond the paper: speed", "speed.py", "speed_*"),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """One file that has an experiment, in part or whole."""

    path: Path
    model: str
    budgets: str
    missing: str  # in words; nothing where it is whole


def lines(results: Path) -> Iterator[str]:
    """Every table and figure, the files that have it and the models that it was not run on."""
    yield "## What was run, and what was not\n"
    yield from markdown_table.lines(("", "file", "model", "budgets", "results"), rows(results))


def rows(results: Path) -> Iterator[tuple[str, ...]]:
    for each in EXPERIMENTS:
        file = each.file if each.file.startswith("`") else f"`{each.file}`"
        found = list(where(results, each))
        for run in found:
            part = f" (in part: {run.missing})" if run.missing else ""
            link = f"[{run.path.name}](../results/{run.path.name})"
            yield each.name, file, run.model, run.budgets, link + part
        never = [model for model in each.models if model not in {run.model for run in found}]
        for model in never if found else never or [""]:
            yield each.name, file, model, "", "not run"


def where(results: Path, each: Experiment) -> Iterator[Found]:
    for path in sorted(results.glob(f"{each.key}.*")):
        if path.suffix != ".json":
            yield Found(path, each.on or BOTH[0], "", "")
            continue
        record = json.loads(path.read_text(encoding="utf-8"))["results"]
        # Budgets of training, or of segmentation, where the whole model is one of the scores.
        budgets = record.get("budgets") or [name for name in record.get("scores", ()) if name != "whole"]
        missing = missing_runs(record["runs"], each.rows) if "runs" in record else ""
        if each.accuracy and not any("top1" in row for row in record["rows"].values()):
            missing = "without accuracy"
        yield Found(path, models_of(record) or each.on, ", ".join(budgets), missing)
    for path in sorted(results.glob("reproduce_*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))["results"]
        table = record["tables"].get(each.key)
        if table is not None:
            budgets, missing = missing_rows(table["rows"], each)
            model = record.get("model", "") if each.models else ""
            yield Found(path, model, ", ".join(f"{budget:.3g}" for budget in budgets), missing)


def missing_rows(rows: Sequence[dict[str, Any]], each: Experiment) -> tuple[list[float], str]:
    """The budgets of a table, and what it has not of the rows that it should have."""
    at: dict[float | None, set[str]] = {}
    for row in rows:
        late = row.get("left_out") == "out of time" or not row.get("complete", True)
        at.setdefault(row.get("budget"), set()).update(set() if late else {row["name"]})
    budgets = [budget for budget in at if budget is not None]
    groups = [at[budget] for budget in budgets] or list(at.values())
    nowhere = [name for name in each.rows if not any(name in names for names in groups)]
    if len(nowhere) == len(each.rows):
        return budgets, "no row"
    whole = sum(set(each.rows) - set(nowhere) <= names for names in groups)
    said = [f"{whole} of {each.budgets} budgets"] if whole < each.budgets else []
    fewer = {row["schedules"] for row in rows if row.get("schedules", RANDOM) < RANDOM}
    said += [f"{count:,} of {RANDOM:,} schedules" for count in sorted(fewer)]
    return budgets, "; ".join(said + ([f"without {'; '.join(nowhere)}"] if nowhere else []))


def missing_runs(runs: Sequence[dict[str, Any]], expected: Iterable[str]) -> str:
    """The trainings that there are not, and those that ended early."""
    there = dict.fromkeys(run["name"] for run in runs)
    early = dict.fromkeys(run["name"] for run in runs if run["epochs"] < run["of_epochs"])
    none = [name for name in expected if name not in there]
    said = {"without": none, "ended before the last epoch:": early}
    return "; ".join(f"{words} {'; '.join(names)}" for words, names in said.items() if names)


def models_of(record: dict[str, Any]) -> str:
    rows = record.get("rows", [])
    named = [row["model"] for row in rows if "model" in row] if isinstance(rows, list) else []
    return str(record.get("model") or ", ".join(dict.fromkeys(named)))
