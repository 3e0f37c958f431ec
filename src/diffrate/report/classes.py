"""Names for class indices, as people know them."""

from __future__ import annotations

import re
from typing import Any

from timm.data import ImageNetInfo

from diffrate.data import Images

IMAGENET = 1000  # classes


def class_names(images: Any, count: int) -> list[str]:
    """Folder names where images lie in folders; ImageNet's own where these are its numbers or synsets."""
    folders = images.class_names() if isinstance(images, Images) else {}
    coded = all(name.isdecimal() or re.fullmatch(r"n\d{8}", name) for name in folders.values())
    if count == IMAGENET and coded:
        known = ImageNetInfo()
        return [
            str(known.index_to_description(i)).partition(",")[0] for i in range(count)
        ]  # the first of its words
    return [folders.get(i, f"class {i}") for i in range(count)]
