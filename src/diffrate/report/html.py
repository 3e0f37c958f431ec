"""HTML in which every text is escaped unless it was made here: no name of a file or a class can become markup."""

from __future__ import annotations

import json
from html import escape
from typing import Any

VOID = {"img", "input", "meta", "link", "br"}


class Html(str):
    """Markup that is safe to put into a page as it is; any other text is escaped."""


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """An element. Children are markup, text, numbers or lists of them; None is left out.

    Attributes: `class_` is class and `aria_label` is aria-label; True stands alone; None and False are left out.
    """
    parts = []
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-") if key != "viewBox" else key
        if value is True:
            parts.append(f" {attribute}")
        elif value is not None and value is not False:
            parts.append(f' {attribute}="{escape(str(value))}"')
    opening = f"<{name}{''.join(parts)}>"
    return Html(opening if name in VOID else f"{opening}{joined(*children)}</{name}>")


def joined(*children: Any) -> Html:
    """Children one after the other."""
    text: list[str] = []
    for child in children:
        if isinstance(child, list | tuple):
            text.append(joined(*child))
        elif child is not None:
            text.append(child if isinstance(child, Html) else escape(str(child)))
    return Html("".join(text))


def data(values: Any, id_: str) -> Html:
    """Values for a script to read. Nothing in them can end the element: angle brackets are written as JSON escapes."""
    text = json.dumps(
        values, allow_nan=False, separators=(",", ":")
    )  # ASCII: every other character is escaped
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="{escape(id_)}">{text}</script>')
