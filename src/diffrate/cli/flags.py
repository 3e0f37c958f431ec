"""Flags that several commands share as one, handed to them as a mapping."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Command = Callable[..., None]


class Flag(NamedTuple):
    """One that may be left out: its type, as typer takes it, and its default."""

    annotation: Any
    default: Any = None


def with_flags(into: str, flags: Mapping[str, Flag]) -> Callable[[Command], Command]:
    """Gives a command, which takes a mapping `into`, further flags; those that were given are then in it."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(*arguments: Any, **values: Any) -> None:
            found = {name: values.pop(name) for name in flags}
            given = {name: value for name, value in found.items() if value is not None}
            command(*arguments, **{into: given}, **values)

        own = inspect.signature(command, eval_str=True)
        parameters = [p for p in own.parameters.values() if p.name != into]
        parameters += [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=flag.default, annotation=flag.annotation
            )
            for name, flag in flags.items()
        ]
        parameters.sort(key=lambda p: p.kind == inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate
