"""`diffrate finetune` and `diffrate train`: a model under a schedule, tuned or from scratch, by one trainer."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from accelerate.utils import DistributedType, set_seed
from torch import Tensor, nn

import diffrate
from diffrate import embedded
from diffrate.cli import options as o
from diffrate.cli.accelerators import start_accelerator, start_tracker
from diffrate.cli.output import show_effective
from diffrate.cli.recipe import with_recipe
from diffrate.data import training_datasets
from diffrate.devices import resolve_device
from diffrate.embedded.build import DEBIAN, HELD_OUT, training_sets
from diffrate.errors import DiffRateError
from diffrate.methods import to_train
from diffrate.methods.ats import AdaptiveSampling
from diffrate.methods.by_image import MEASURED_ON
from diffrate.models import load_model
from diffrate.results import check_target, write_results
from diffrate.schedule import Schedule
from diffrate.searching.budget import parse_gmacs
from diffrate.training import DEIT, EMBEDDED, FINETUNE, Recipe, Trained, accuracy, finetune, train

DROP_PATH = 0.05  # of the embedded model
TRAINING = "Training"

ModelName = Annotated[
    str,
    typer.Option("--model", help="timm model name; the embedded ViT without it.", rich_help_panel=o.MODEL),
]
DropPath = Annotated[
    float | None,
    typer.Option(
        help="Share of the residual branches dropped in the last block; 0.1 without it, 0.05 of the embedded model.",
        rich_help_panel=o.MODEL,
    ),
]
Output = Annotated[
    Path,
    typer.Option(help="Folder for weights, state and metrics.json.", rich_help_panel=TRAINING),
]
ValSplit = Annotated[
    str | None,
    typer.Option(help="Subfolder, or split, that chooses the best epoch.", rich_help_panel=o.DATA),
]
HeldOut = Annotated[
    int,
    typer.Option(
        help="Embedded model: training images kept apart to choose the best epoch.",
        min=1,
        rich_help_panel=o.DATA,
    ),
]
MaxMinutes = Annotated[
    float,
    typer.Option(help="Stop before the epoch that would take longer.", min=0.0, rich_help_panel=TRAINING),
]
SaveMinutes = Annotated[
    float,
    typer.Option(help="Save the state so often, beside every epoch.", min=0.0, rich_help_panel=TRAINING),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on with the training in the output folder.", rich_help_panel=TRAINING),
]
Tracker = Annotated[
    str | None,
    typer.Option(help="An accelerate tracker, such as tensorboard or wandb.", rich_help_panel=TRAINING),
]


class Job(NamedTuple):
    """What both commands read from their flags."""

    model: nn.Module
    schedule: Schedule | None
    tuned: diffrate.CompressedModel  # the model under its schedule or method
    training: Any
    validation: Any
    test: Any  # only the embedded model's images have one
    recipe: Recipe
    options: dict[str, Any]  # of `train`


@with_recipe(FINETUNE)
def finetune_command(
    context: typer.Context,
    output: Output,
    changes: dict[str, Any],
    schedule: o.ScheduleText = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="A method instead of a schedule, see `diffrate methods`.", rich_help_panel=o.SCHEDULE
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Of the method: 0.8G, 60%.", rich_help_panel=o.SCHEDULE)
    ] = None,
    model: ModelName = embedded.NAME,
    checkpoint: o.Checkpoint = None,
    pretrained: o.Pretrained = False,
    num_classes: o.NumClasses = None,
    model_kwargs: o.ModelKwargs = None,
    img_size: o.ImgSize = None,
    drop_path: DropPath = None,
    data_dir: o.DataDir = None,
    dataset: o.DatasetName = "",
    split: o.Split = None,
    val_split: ValSplit = None,
    held_out: HeldOut = HELD_OUT,
    class_map: o.ClassMap = None,
    workers: o.Workers = 2,
    crop_pct: o.CropPct = None,
    mean: o.Mean = None,
    std: o.Std = None,
    interpolation: o.Interpolation = None,
    max_minutes: MaxMinutes = float("inf"),
    save_minutes: SaveMinutes = 10.0,
    resume: Resume = False,
    tracker: Tracker = None,
    device: o.Device = None,
) -> None:
    """Tune a model under a schedule, with tokens really dropped; the paper's recipe unless told otherwise.

    With --method and --budget under another method, by its own loss; `eval` and `compare` take the folder as --trained.

    Several processes: accelerate launch -m diffrate finetune …, or torchrun --nproc-per-node 8 -m diffrate finetune …

    Example: diffrate finetune --model deit_small_patch16_224 --pretrained --schedule published:2.9 --data-dir imagenet
    --output runs/deit
    """
    if (schedule is None) == (method is None):
        raise DiffRateError("fine-tuning needs a --schedule, or a --method with its --budget")
    if (method is None) != (budget is None):
        raise DiffRateError("--method and --budget go together")
    job = _read(context, replace(FINETUNE, **changes), True)
    trained = finetune(job.model, job.tuned, job.training, job.validation, output, job.recipe, **job.options)
    _write(context, "finetune", job, trained)


@with_recipe(DEIT)
def train_command(
    context: typer.Context,
    output: Output,
    changes: dict[str, Any],
    model: ModelName = embedded.NAME,
    num_classes: o.NumClasses = None,
    model_kwargs: o.ModelKwargs = None,
    img_size: o.ImgSize = None,
    drop_path: DropPath = None,
    schedule: o.ScheduleText = None,
    data_dir: o.DataDir = None,
    dataset: o.DatasetName = "",
    split: o.Split = None,
    val_split: ValSplit = None,
    held_out: HeldOut = HELD_OUT,
    class_map: o.ClassMap = None,
    workers: o.Workers = 2,
    crop_pct: o.CropPct = None,
    mean: o.Mean = None,
    std: o.Std = None,
    interpolation: o.Interpolation = None,
    max_minutes: MaxMinutes = float("inf"),
    save_minutes: SaveMinutes = 10.0,
    resume: Resume = False,
    tracker: Tracker = None,
    device: o.Device = None,
) -> None:
    """Train a model from scratch, whole or under a schedule; DeiT's recipe unless told otherwise.

    Without --model: the embedded ViT on Fashion-MNIST, with the recipe of the weights that ship (minutes on a GPU,
    many hours on a CPU); --data-dir then holds the four *-ubyte.gz files, as Debian's package dataset-fashion-mnist has
    them.

    Example: diffrate train --output runs/fashion --data-dir /usr/share/datasets/fashion-mnist --compile
    """
    job = _read(context, replace(EMBEDDED if model == embedded.NAME else DEIT, **changes), False)
    whole = job.schedule is None
    trained = train(
        job.model if whole else job.tuned, job.training, job.validation, output, job.recipe, **job.options
    )
    _write(context, "train", job, trained)


def _read(context: typer.Context, recipe: Recipe, tuning: bool) -> Job:
    flags: dict[str, Any] = context.params
    check_target(flags["output"] / "metrics.json")
    where = resolve_device(flags["device"])
    set_seed(recipe.seed)
    name, test = flags["model"], None
    drop_path = _drop_path(name, flags["drop_path"])
    if name == embedded.NAME:
        training, validation, test = training_sets(flags["data_dir"] or DEBIAN, flags["held_out"])
        model: nn.Module = embedded.model(pretrained=tuning, drop_path_rate=drop_path)
    else:
        size = None if flags["img_size"] is None else o.read_size(flags["img_size"])
        kwargs = o.read_kwargs(flags["model_kwargs"])
        if drop_path is not None:
            kwargs = {"drop_path_rate": drop_path, **kwargs}
        model = load_model(
            name, flags.get("checkpoint"), flags.get("pretrained", False), flags["num_classes"], size, kwargs
        )
        same = ("data_dir", "dataset", "split", "val_split", "class_map", "crop_pct", "mean", "std")
        images = {key: flags[key] for key in (*same, "interpolation")}
        augmentation = {
            key: getattr(recipe, key) for key in ("rand_augment", "color_jitter", "erasing", "smallest_crop")
        }
        training, validation = training_datasets(model, img_size=size, **images, **augmentation)
    accelerator = start_accelerator(where, recipe.precision, flags["tracker"], flags["output"])
    schedule = None if flags["schedule"] is None else o.read_schedule(flags["schedule"], model, name)
    tuned = diffrate.compress(model, schedule)
    if flags.get("method") is not None:
        (target,) = _gmacs(flags["budget"], model)
        seen = _some(validation) if flags["method"] == AdaptiveSampling.name else None
        tuned = to_train(flags["method"], model, target, seen)
    if schedule is not None and accelerator.is_main_process:
        show_effective(schedule)
    if tuning:
        o.note_random_weights(name, flags["checkpoint"], flags["pretrained"])
    names = ("model", "checkpoint", "pretrained", "model_kwargs", "num_classes", "img_size")
    places = ("data_dir", "dataset", "split", "val_split", "held_out", "class_map")
    looks = ("crop_pct", "mean", "std", "interpolation")
    origin = {key: _plain(flags.get(key)) for key in (*names, *places, *looks)} | {"drop_path": drop_path}
    start_tracker(accelerator, flags["tracker"], {"model": name, **asdict(recipe)})
    options = {
        "accelerator": accelerator, "workers": flags["workers"], "resume": flags["resume"], "origin": origin,
        "max_minutes": flags["max_minutes"], "save_minutes": flags["save_minutes"],
        "dtype": torch.float16 if name == embedded.NAME else None,
    }  # fmt: skip
    return Job(model, schedule, tuned, training, validation, test, recipe, options)


def _some(validation: Any) -> Tensor:
    """Images spread over a set, on which a method that decides image by image finds its setting."""
    places = torch.linspace(0, len(validation) - 1, min(MEASURED_ON, len(validation))).round().int().tolist()
    return torch.stack([validation[place][0] for place in places])


def _drop_path(name: str, given: float | None) -> float | None:
    """The share of branches that are dropped while training; None for models of other libraries, which drop none."""
    if given is not None and not 0 <= given < 1:
        raise DiffRateError(f"--drop-path is a share below 1, not {given:g}")
    if ":" in name:
        if given:
            raise DiffRateError(f"--drop-path is for timm's models: {name} has no such setting")
        return None
    return (DROP_PATH if name == embedded.NAME else 0.1) if given is None else given


def _gmacs(budget: str, model: nn.Module) -> list[float]:
    budgets = parse_gmacs(budget, diffrate.gmacs(model))
    if len(budgets) > 1:
        raise DiffRateError("a model is tuned for one budget: give --budget once")
    return budgets


def _write(context: typer.Context, command: str, job: Job, trained: Trained) -> None:
    """metrics.json in the output folder: how good the weights are and how they were made."""
    accelerator, output = job.options["accelerator"], context.params["output"]
    accelerator.end_training()
    if not accelerator.is_main_process:
        return
    tested = job.tuned
    results: dict[str, Any] = {}
    if (
        job.test is not None and accelerator.distributed_type != DistributedType.FSDP
    ):  # which needs all processes
        results["test_accuracy"] = accuracy(tested, job.test)
        results["embedded_test_accuracy"] = accuracy(tested, embedded.dataset("test"))
    results |= {
        "validation_accuracy": trained.accuracy,
        "best_epoch": trained.epoch,
        "seconds": round(trained.seconds, 1),
        "processes": accelerator.num_processes,
        "parameters": sum(p.numel() for p in job.tuned.parameters()),
        "training_images": len(job.training),
        "gmacs": diffrate.gmacs(job.tuned),
        "schedule": None if job.schedule is None else job.schedule.to_dict(),
        "method": None if job.schedule is not None or command == "train" else job.tuned.settings(),
        "recipe": asdict(job.recipe) | {"drop_path": job.options["origin"]["drop_path"]},
        "history": trained.history,
    }
    write_results(output / "metrics.json", _command(context, command), results, accelerator.device)
    if "test_accuracy" in results:
        typer.echo(
            f"{results['test_accuracy']:.2f} % on the {len(job.test):,} test images, "
            f"{results['embedded_test_accuracy']:.2f} % on the {embedded.SPLITS['test']:,} that ship"
        )
    typer.echo(
        f"{trained.accuracy:.2f} % on the {len(job.validation):,} validation images at "
        f"{results['gmacs']:.3f} GMACs; best epoch {trained.epoch}; {trained.seconds:.0f} s; {output}"
    )


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _command(context: typer.Context, command: str) -> str:
    """The command that makes the same weights: what differs from the defaults, wherever the folders are."""
    words = ["diffrate", command]
    for parameter in context.command.params:
        value, flag = context.params.get(parameter.name or ""), parameter.opts[0]
        if isinstance(value, Path):
            words += [flag, "DIR"]
        elif value is True and parameter.default is not True:
            words += [flag]
        elif value not in (parameter.default, ()):
            words += [flag, str(value)]
    return shlex.join(words)
