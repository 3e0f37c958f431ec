"""`diffrate schedules`, `macs` and `compress`: schedules and what they cost, without any data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

import diffrate
from diffrate import published
from diffrate.backbones import backbone_of
from diffrate.cli import options as o
from diffrate.cli.flags import with_flags
from diffrate.cli.output import counts, note, save_json, show_effective, show_table
from diffrate.errors import DiffRateError
from diffrate.models import input_size, load_model
from diffrate.results import check_target
from diffrate.schedule import Schedule


def schedules(
    model: Annotated[str | None, typer.Option(help="Only those published for this timm model.")] = None,
    json: o.JsonFile = None,
) -> None:
    """List the schedules published with the paper.

    Example: diffrate schedules --model deit_small_patch16_224
    """
    check_target(json)
    table = published.table()
    if model is not None:
        table = _published_for(model, table)
    show_table(
        ["model", "published:", "prune", "merge"],
        [
            [", ".join(row["models"]), f"{row['gmacs']:g}", counts(row["prune"]), counts(row["merge"])]
            for row in table
        ],
        text=4,
    )
    save_json(json, {"schedules": table})


def macs(
    model: o.ModelName,
    num_classes: o.NumClasses = None,
    model_kwargs: o.ModelKwargs = None,
    img_size: o.ImgSize = None,
    schedule: o.ScheduleText = None,
    json: o.JsonFile = None,
) -> None:
    """Count the multiply-accumulates of one image through a model, whole and under a schedule.

    Example: diffrate macs --model deit_small_patch16_224 --schedule published:2.9
    """
    check_target(json)
    size = None if img_size is None else o.read_size(img_size)
    whole = load_model(
        model, num_classes=num_classes, img_size=size, model_kwargs=o.read_kwargs(model_kwargs)
    )
    gmacs = {"uncompressed": diffrate.gmacs(whole)}
    if schedule is not None:
        chosen = o.read_schedule(schedule, whole, model)
        gmacs["compressed"] = diffrate.gmacs(whole, chosen)
        show_effective(chosen)
    show_table(["", "GMACs"], [[name, f"{value:.3f}"] for name, value in gmacs.items()])
    save_json(json, {"model": model, "img_size": input_size(whole), "gmacs": gmacs})


@with_flags("removal", o.REMOVAL)
def compress(
    model: o.ModelName,
    output: Annotated[Path, typer.Option("--output", "-o", help="Schedule file to write.")],
    removal: dict[str, Any],
    num_classes: o.NumClasses = None,
    model_kwargs: o.ModelKwargs = None,
    img_size: o.ImgSize = None,
    schedule: o.ScheduleText = None,
    prune: Annotated[
        str | None,
        typer.Option(help="Tokens kept after pruning, one count a block.", rich_help_panel=o.SCHEDULE),
    ] = None,
    merge: Annotated[
        str | None,
        typer.Option(help="Tokens kept after merging, one count a block.", rich_help_panel=o.SCHEDULE),
    ] = None,
    json: o.JsonFile = None,
) -> None:
    """Write a schedule file, checked against a model, with its cost and how it was made.

    It comes from the paper (published:GMACS), from another file, or from --prune and --merge. Without one of the two
    lists, blocks remove tokens in the other way alone.

    Example: diffrate compress --model vit_tiny_patch16_224 --schedule published:0.8 --output tiny.json
    """
    check_target(json)
    check_target(output)
    size = None if img_size is None else o.read_size(img_size)
    whole = load_model(
        model, num_classes=num_classes, img_size=size, model_kwargs=o.read_kwargs(model_kwargs)
    )
    if (schedule is None) == (prune is None and merge is None):
        raise DiffRateError("give either --schedule, or --prune and --merge")
    if schedule is not None:
        chosen = o.read_schedule(schedule, whole, model)
    else:
        chosen = _from_lists(prune, merge, backbone_of(whole).layout.prefix)
    compressed = diffrate.compress(whole, chosen, **o.operator_changes(removal))
    checked = dataclasses.replace(
        chosen,
        operator=compressed.operator,
        model=model,
        img_size=input_size(whole),
        cost={**chosen.cost, "gmacs": diffrate.gmacs(whole, chosen)},
    )
    show_effective(checked)
    checked.save(output)
    before, after = diffrate.gmacs(whole), checked.cost["gmacs"]
    typer.echo(f"{output}: {checked.depth} blocks, {before:.3f} -> {after:.3f} GMACs ({after / before:.0%})")
    save_json(json, {"output": str(output), "uncompressed_gmacs": before, "schedule": checked.to_dict()})


def _from_lists(prune: str | None, merge: str | None, prefix: int) -> Schedule:
    pruned = None if prune is None else o.read_counts("prune", prune)
    merged = None if merge is None else o.read_counts("merge", merge)
    if pruned is None and merged is not None:
        pruned = (*merged[:1], *merged[:-1])  # each block hands all it received on to its merge
    elif merged is None and pruned is not None:
        merged = pruned
    assert pruned is not None
    assert merged is not None
    return Schedule(pruned, merged, prefix, made={"by": "--prune and --merge counts given by hand"})


def _published_for(model: str, table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a model, or those of the family whose shape it has."""
    own = [row for row in table if any(_same_model(model, name) for name in row["models"])]
    if own:
        return own
    family = published.SAME_SHAPE.get(model.split(".")[0])
    if family is None:
        raise DiffRateError(
            f"no schedule is published for {model!r}; `diffrate schedules` lists those that are"
        )
    note(f"{model} has the shape of {family}, whose schedules it can borrow")
    return [row for row in table if row["family"] == family]


def _same_model(asked: str, name: str) -> bool:
    return asked == name or asked.startswith(name + ".") or name.startswith(asked + ".")
