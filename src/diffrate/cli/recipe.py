"""The flags of a recipe: every command that trains has one for each of its fields, with the field's own help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import get_type_hints

import typer
from rich.markup import escape

from diffrate.cli.flags import Command, Flag, with_flags
from diffrate.training.recipe import Recipe

RECIPE = "Recipe"


def with_recipe(default: Recipe) -> Callable[[Command], Command]:
    """Gives a command, which takes `changes`, a flag for each field of a recipe; `default` is what help shows.

    `changes` then holds the fields that were given, so that the command may choose what they are changes of.
    """
    hints = get_type_hints(Recipe)
    flags = {}
    for field in fields(Recipe):
        shown = field.metadata["help"] + escape(f" [{getattr(default, field.name)}]")
        option = typer.Option(None, help=shown, rich_help_panel=RECIPE, show_default=False)
        flags[field.name] = Flag(hints[field.name] | None, option)
    return with_flags("changes", flags)
