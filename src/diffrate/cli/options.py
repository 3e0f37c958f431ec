"""Options that several commands share, under timm's names, and how their values are read."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from diffrate import embedded, published
from diffrate.cli.flags import Flag
from diffrate.cli.output import note
from diffrate.data import LARGEST_BATCH, MOST_WORKERS
from diffrate.devices import AMP_DTYPES
from diffrate.errors import DiffRateError, shown
from diffrate.operator import CHOICES, IMPORTANCES, MEANS, OPERATIONS, Operator
from diffrate.schedule import Schedule
from diffrate.searching.fast import OPERATOR as FAST

MODEL, DATA, SCHEDULE, RUN = "Model", "Data", "Schedule", "Run"
PUBLISHED = "published:"


def read_size(text: str) -> tuple[int, int]:
    """`224`, or `224x320` for height x width."""
    height, _, width = text.lower().partition("x")
    try:
        size = int(height), int(width or height)
    except ValueError:
        raise DiffRateError(
            f"an image size is a number of pixels such as 224 or 224x320, not {text!r}"
        ) from None
    if min(size) < 1:
        raise DiffRateError(f"an image size must be positive, not {text!r}")
    return size


def known_amp_dtype(name: str) -> str:
    """The name, whether mixed precision is asked for or not."""
    if name not in AMP_DTYPES:
        raise DiffRateError(f"amp dtype must be one of {', '.join(AMP_DTYPES)}, not {shown(name)}")
    return name


def read_counts(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(count) for count in text.replace(",", " ").split())
    except ValueError:
        raise DiffRateError(f"--{name} takes one count a block, such as 197,180,160, not {text!r}") from None


def read_kwargs(pairs: list[str] | None) -> dict[str, Any]:
    """`key=value` pairs; values are Python literals where they look like one, else text."""
    read: dict[str, Any] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise DiffRateError(f"--model-kwargs takes key=value, not {pair!r}")
        try:
            read[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            read[key] = value
    return read


def read_schedule(text: str, model: nn.Module, name: str) -> Schedule:
    """A schedule file, or `published:GMACS` for the paper's schedule of that budget; says when it is borrowed."""
    if not text.startswith(PUBLISHED):
        schedule = Schedule.load(text)
        if schedule.model is not None and schedule.model.split(".")[0] != name.split(".")[0]:
            note(f"the schedule was made for {schedule.model}, not for {name}")
        return schedule
    try:
        gmacs = float(text.removeprefix(PUBLISHED))
    except ValueError:
        raise DiffRateError(
            f"a published schedule is named by its GMACs, such as published:0.8, not {text!r}"
        ) from None
    schedule, remark = published.for_model(model, name, gmacs)
    if remark:
        note(remark)
    return schedule


def note_random_weights(model: str, checkpoint: Path | None, pretrained: bool) -> None:
    if checkpoint is None and not pretrained and model != embedded.NAME:
        note("neither --checkpoint nor --pretrained was given: the model has random weights")


def dataset_for(model: str, dataset: str, data_dir: Path | None) -> str:
    """The dataset that was named; where no images were, those that ship for the model that ships."""
    return embedded.NAME if model == embedded.NAME and data_dir is None and not dataset else dataset


ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        help="timm model name, library:name, or embedded for the one that ships.",
        rich_help_panel=MODEL,
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(help="Weights to load: safetensors, or a torch file of tensors.", rich_help_panel=MODEL),
]
Pretrained = Annotated[
    bool, typer.Option("--pretrained", help="Download timm's weights.", rich_help_panel=MODEL)
]
NumClasses = Annotated[
    int | None, typer.Option(help="Classes of the classifier.", min=1, rich_help_panel=MODEL)
]
ModelKwargs = Annotated[
    list[str] | None,
    typer.Option(help="key=value for timm.create_model; may be repeated.", rich_help_panel=MODEL),
]
ImgSize = Annotated[
    str | None,
    typer.Option(help="Image size in pixels: 224, or 224x320 (height x width).", rich_help_panel=MODEL),
]

DataDir = Annotated[
    Path | None, typer.Option(help="Folder with one folder of images a class.", rich_help_panel=DATA)
]
DatasetName = Annotated[
    str,
    typer.Option(
        "--dataset",
        help="timm dataset: empty for folders, or hfds/…, wds/…, torch/…; embedded: the images that ship.",
        rich_help_panel=DATA,
    ),
]
Split = Annotated[
    str | None, typer.Option(help="Subfolder, or split of the dataset, to read.", rich_help_panel=DATA)
]
ClassMap = Annotated[
    str | None,
    typer.Option(help="timm class map: a text file with one folder name a line.", rich_help_panel=DATA),
]
MostImages = Annotated[
    int | None,
    typer.Option(
        "--images",
        help="No more images than these: of a folder evenly spread, of other datasets the first.",
        min=1,
        rich_help_panel=DATA,
    ),
]
BatchSize = Annotated[
    int, typer.Option(help="Images per batch.", min=1, max=LARGEST_BATCH, rich_help_panel=DATA)
]
Workers = Annotated[
    int, typer.Option(help="Processes that read images.", min=0, max=MOST_WORKERS, rich_help_panel=DATA)
]
CropPct = Annotated[
    float | None, typer.Option(help="Centre crop, as a fraction of the resized image.", rich_help_panel=DATA)
]
Mean = Annotated[
    tuple[float, float, float] | None, typer.Option(help="Mean of the normalisation.", rich_help_panel=DATA)
]
Std = Annotated[
    tuple[float, float, float] | None,
    typer.Option(help="Deviation of the normalisation.", rich_help_panel=DATA),
]
Interpolation = Annotated[
    str | None, typer.Option(help="How images are resized: bicubic, bilinear, ….", rich_help_panel=DATA)
]

ScheduleText = Annotated[
    str | None,
    typer.Option("--schedule", help="A schedule file, or published:GMACS.", rich_help_panel=SCHEDULE),
]
Trained = Annotated[
    Path | None,
    typer.Option(help="A folder that `diffrate finetune` wrote.", rich_help_panel=SCHEDULE),
]
Importance = Annotated[
    str | None, typer.Option(help=f"What ranks tokens: {', '.join(IMPORTANCES)}.", rich_help_panel=SCHEDULE)
]
Operation = Annotated[
    str | None,
    typer.Option(help=f"How tokens are removed: {', '.join(OPERATIONS)}.", rich_help_panel=SCHEDULE),
]
Proportional = Annotated[
    bool | None,
    typer.Option(
        "--proportional/--no-proportional",
        help="Attend in proportion to token sizes.",
        rich_help_panel=SCHEDULE,
    ),
]
MergeMean = Annotated[
    str | None, typer.Option(help=f"What merged tokens become: {', '.join(MEANS)}.", rich_help_panel=SCHEDULE)
]
Choice = Annotated[
    str | None, typer.Option(help=f"Which tokens are merged: {', '.join(CHOICES)}.", rich_help_panel=SCHEDULE)
]
Floor = Annotated[
    float | None,
    typer.Option(
        help="With choice cost: what every token is worth at least, of the mean importance.",
        rich_help_panel=SCHEDULE,
    ),
]
ImageShare = Annotated[
    float | None,
    typer.Option(
        help="Share of the importance that image tokens have a say in; the paper's is 0.",
        rich_help_panel=SCHEDULE,
    ),
]
Memory = Annotated[
    float | None,
    typer.Option(
        help="Share of the importance that comes from earlier blocks; the paper's is 0.",
        rich_help_panel=SCHEDULE,
    ),
]
PrunedMass = Annotated[
    bool | None,
    typer.Option(
        "--pruned-mass/--no-pruned-mass",
        help="Leave the size of pruned tokens to the most similar one.",
        rich_help_panel=SCHEDULE,
    ),
]
SizeAware = Annotated[
    bool | None,
    typer.Option(
        "--size-aware/--no-size-aware",
        help="Merge into tokens that are no smaller.",
        rich_help_panel=SCHEDULE,
    ),
]
KeepNorm = Annotated[
    bool | None,
    typer.Option(
        "--keep-norm/--no-keep-norm",
        help="A merged token keeps its longest member's norm.",
        rich_help_panel=SCHEDULE,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Seed of the random importance.", min=0, max=2**31 - 1, rich_help_panel=SCHEDULE),
]
OPERATORS = {"paper": Operator(), "fast": FAST}
OperatorName = Annotated[
    str | None,
    typer.Option(
        "--operator",
        help=f"The whole operator, of which other flags change parts: {' or '.join(OPERATORS)}, as in a recipe.",
        rich_help_panel=SCHEDULE,
    ),
]
# How tokens are removed, for commands that take a schedule.
REMOVAL = {
    "operator": Flag(OperatorName), "importance": Flag(Importance), "operation": Flag(Operation),
    "proportional": Flag(Proportional),
    "merge_mean": Flag(MergeMean), "choice": Flag(Choice), "floor": Flag(Floor), "image_share": Flag(ImageShare),
    "memory": Flag(Memory), "pruned_mass": Flag(PrunedMass), "size_aware": Flag(SizeAware),
    "keep_norm": Flag(KeepNorm), "seed": Flag(Seed),
}  # fmt: skip

# For commands without one, in which --seed, where there is one, is not that of a random importance.
OPERATOR = {name: flag for name, flag in REMOVAL.items() if name != "seed"}


def operator_changes(removal: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of REMOVAL as fields of an Operator: --mean is that of images, --operator what others leave open."""
    fields = {"mean" if name == "merge_mean" else name: value for name, value in removal.items()}
    whole = fields.pop("operator", None)
    if whole is None:
        return fields
    if whole not in OPERATORS:
        raise DiffRateError(f"operator must be one of {', '.join(OPERATORS)}, not {shown(whole)}")
    return {**asdict(OPERATORS[whole]), **fields}


Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, …; the GPU if there is one.", rich_help_panel=RUN)
]
Amp = Annotated[bool, typer.Option("--amp", help="Run in mixed precision.", rich_help_panel=RUN)]
AmpDtype = Annotated[
    str,
    typer.Option(
        help=f"Type for --amp: {' or '.join(AMP_DTYPES)}.", rich_help_panel=RUN, callback=known_amp_dtype
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the results and their origin here.", rich_help_panel=RUN)
]
