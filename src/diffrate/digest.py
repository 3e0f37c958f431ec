"""A digest inside a file, so that a state which was damaged on disk is refused instead of gone on from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

KEY = "sha256"


def digest(*parts: bytes | memoryview | str) -> str:
    made = hashlib.sha256()
    for part in parts:
        content = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        made.update(
            str(len(content)).encode() + b" "
        )  # so that what moves from one part to the next is noticed
        made.update(content)
    return made.hexdigest()


def signed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with their digest, as JSON will bring them back."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return {**plain, KEY: digest(json.dumps(plain))}


def is_whole(values: Mapping[str, Any]) -> bool:
    """Whether decoded values are what `signed` returned."""
    rest = {name: value for name, value in values.items() if name != KEY}
    return values.get(KEY) == digest(json.dumps(rest))
