"""The flags of a recipe: every command that trains has one for each of its fields, with the field's own help."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

import typer

from diffrate.training.recipe import Recipe

RECIPE = "Recipe"


def with_recipe(default: Recipe) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command, which takes `changes`, a flag for each field of a recipe; `default` is what help shows.

    `changes` then holds the fields that were given, so that the command may choose what they are changes of.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(Recipe)
        names = [field.name for field in fields(Recipe)]

        @functools.wraps(command)
        def run(*arguments: Any, **values: Any) -> None:
            flags = {name: values.pop(name) for name in names}
            changes = {name: value for name, value in flags.items() if value is not None}
            command(*arguments, changes=changes, **values)

        own = inspect.signature(command, eval_str=True)
        parameters = [p for p in own.parameters.values() if p.name != "changes"]
        for field in fields(Recipe):
            shown = f"{field.metadata['help']} [{getattr(default, field.name)}]"
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=typer.Option(None, help=shown, rich_help_panel=RECIPE, show_default=False),
                    annotation=hints[field.name] | None,
                )
            )
        parameters.sort(key=lambda p: p.kind == inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate
