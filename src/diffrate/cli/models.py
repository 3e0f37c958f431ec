"""`diffrate models`: what can be compressed, and what that would mean for one model."""

from __future__ import annotations

from dataclasses import astuple
from typing import Annotated

import typer

from diffrate.cli import options as o
from diffrate.cli.output import save_json, show_table
from diffrate.models import load_model
from diffrate.results import check_target
from diffrate.supported import compressible, families

COLUMNS = ["library", "install", "models", "example", "compressed"]


def models(
    model: Annotated[
        str | None,
        typer.Option(
            help="Say what would be compressed of this model, and at what cost.", rich_help_panel=o.MODEL
        ),
    ] = None,
    num_classes: o.NumClasses = None,
    model_kwargs: o.ModelKwargs = None,
    img_size: o.ImgSize = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the list as a Markdown table.")] = False,
    json: o.JsonFile = None,
) -> None:
    """List the families of models that can be compressed, or look at one model.

    Example: diffrate models --model vit_small_patch16_dinov3
    """
    check_target(json)
    if model is None:
        rows = [astuple(family) for family in families()]
        if markdown:
            typer.echo(markdown_table(rows))
        else:
            show_table(COLUMNS, rows, text=len(COLUMNS))
        save_json(json, {"families": [dict(zip(COLUMNS, row, strict=True)) for row in rows]})
        return
    size = None if img_size is None else o.read_size(img_size)
    whole = load_model(
        model, num_classes=num_classes, img_size=size, model_kwargs=o.read_kwargs(model_kwargs)
    )
    found = compressible(whole, model)
    height, width = found.img_size
    first, last = found.blocks
    published = ", ".join(f"{gmacs:g}" for gmacs in found.published) or "none"
    if found.borrowed_from is not None:
        published += f" (of {found.borrowed_from}, a model of the same shape)"
    show_table(
        ["", model],
        [
            ["library", found.library],
            [
                "input",
                f"{height}x{width} pixels, {found.tokens} tokens, {found.prefix} of them never removed",
            ],
            ["compressed", f"blocks {first} to {last} of {found.depth} ({found.compresses})"],
            ["ranked by", found.importance],
            ["head", found.head],
            ["GMACs", f"{found.gmacs:.3f} whole, {found.least_gmacs:.3f} at the least"],
            ["published schedules", published],
        ],
        text=2,
    )
    save_json(json, found.to_dict())


def markdown_table(rows: list[tuple[str, ...]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
