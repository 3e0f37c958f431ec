"""`diffrate train`: make the embedded model's weights from Fashion-MNIST."""

import shlex
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from accelerate.utils import set_seed

from diffrate import embedded
from diffrate.embedded.build import DEBIAN, HELD_OUT, training_sets
from diffrate.errors import DiffRateError
from diffrate.results import check_target, write_results
from diffrate.train import Recipe, accuracy, train

DEFAULT = Recipe()
HELP = {field.name: field.metadata["help"] for field in fields(Recipe)}


def _help(name: str) -> Any:
    return typer.Option(help=HELP[name])


def train_command(
    context: typer.Context,
    output: Annotated[Path, typer.Option(help="Folder for weights.safetensors and metrics.json.")],
    data: Annotated[str, typer.Option(help="Data set; so far fashion-mnist.")] = "fashion-mnist",
    data_dir: Annotated[Path, typer.Option(help="Folder with its four *-ubyte.gz files.")] = DEBIAN,
    max_minutes: Annotated[float, typer.Option(help="Stop before the epoch that would take longer.")] = float(
        "inf"
    ),
    held_out: Annotated[
        int, typer.Option(help="Training images kept apart to choose the best epoch.")
    ] = HELD_OUT,
    drop_path: Annotated[
        float, typer.Option(help="Share of the residual branches dropped in the last block.")
    ] = 0.05,
    epochs: Annotated[int, _help("epochs")] = DEFAULT.epochs,
    batch_size: Annotated[int, _help("batch_size")] = DEFAULT.batch_size,
    lr: Annotated[float, _help("lr")] = DEFAULT.lr,
    weight_decay: Annotated[float, _help("weight_decay")] = DEFAULT.weight_decay,
    warmup_epochs: Annotated[int, _help("warmup_epochs")] = DEFAULT.warmup_epochs,
    clip_grad: Annotated[float, _help("clip_grad")] = DEFAULT.clip_grad,
    smoothing: Annotated[float, _help("smoothing")] = DEFAULT.smoothing,
    mixup: Annotated[float, _help("mixup")] = DEFAULT.mixup,
    cutmix: Annotated[float, _help("cutmix")] = DEFAULT.cutmix,
    mix_prob: Annotated[float, _help("mix_prob")] = DEFAULT.mix_prob,
    rand_augment: Annotated[int, _help("rand_augment")] = DEFAULT.rand_augment,
    crop_padding: Annotated[int, _help("crop_padding")] = DEFAULT.crop_padding,
    erasing: Annotated[float, _help("erasing")] = DEFAULT.erasing,
    ema_decay: Annotated[float, _help("ema_decay")] = DEFAULT.ema_decay,
    precision: Annotated[str, _help("precision")] = DEFAULT.precision,
    compile: Annotated[bool, _help("compile")] = DEFAULT.compile,
    seed: Annotated[int, _help("seed")] = DEFAULT.seed,
) -> None:
    """Train the embedded vision transformer from scratch; write its weights (fp16) and how they were made.

    The defaults are the recipe of the weights that ship: minutes on a GPU, many hours on a CPU.

    Example: diffrate train --output runs/fashion --data-dir /usr/share/datasets/fashion-mnist --compile
    """
    if data != "fashion-mnist":
        raise DiffRateError(f"there is no data set {data!r} to train on: so far only fashion-mnist")
    recipe = Recipe(**{name: context.params[name] for name in HELP})
    check_target(output / "metrics.json")
    training, validation, test = training_sets(data_dir, held_out)
    set_seed(seed)
    model = embedded.model(pretrained=False, drop_path_rate=drop_path)
    trained = train(model, training, validation, output, recipe, max_minutes)
    results = {
        "test_accuracy": accuracy(model, test),
        "embedded_test_accuracy": accuracy(model, embedded.dataset("test")),
        "validation_accuracy": trained.accuracy,
        "best_epoch": trained.epoch,
        "seconds": round(trained.seconds, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_images": len(training),
        "recipe": asdict(recipe) | {"drop_path": drop_path},
        "history": trained.history,
    }
    write_results(output / "metrics.json", _command(context), results, next(model.parameters()).device)
    typer.echo(
        f"{results['test_accuracy']:.2f} % on the {len(test):,} test images, "
        f"{results['embedded_test_accuracy']:.2f} % on the {embedded.SPLITS['test']:,} that ship; "
        f"best epoch {trained.epoch}; {trained.seconds:.0f} s; {output}"
    )


def _command(context: typer.Context) -> str:
    """The command that makes the same weights: what differs from the defaults, wherever the folders are."""
    words = ["diffrate", "train"]
    for parameter in context.command.params:
        value, flag = context.params.get(parameter.name or ""), parameter.opts[0]
        if isinstance(value, Path):
            words += [flag, "DIR"]
        elif value is True and parameter.default is False:
            words += [flag]
        elif value != parameter.default:
            words += [flag, str(value)]
    return shlex.join(words)


def main() -> None:
    typer.run(train_command)
