"""Class maps: text files with the name of one class folder a line, in the order of the model's classes.

Read here and not by timm, which would also take a pickle, and before 1.0.28 ran it.
"""

from __future__ import annotations

from pathlib import Path

from diffrate.errors import DiffRateError
from diffrate.schedule import check_is_file

LONGEST_FILE = 1 << 24  # bytes: ImageNet-21k's has half a million


def read_class_map(file: str | Path, root: str | Path | None = None) -> dict[str, int]:
    """The class index of each folder name; a file that is not found as it is named is looked for in `root`."""
    path = Path(file)
    if root is not None and not path.exists():
        path = Path(root) / file
    check_is_file(path)
    if not path.exists():
        raise DiffRateError(f"class map {file} does not exist")
    if path.stat().st_size > LONGEST_FILE:
        raise DiffRateError(f"class map {file} has more than {LONGEST_FILE:,} bytes")
    try:
        with path.open(encoding="utf-8") as lines:
            return {name.strip(): index for index, name in enumerate(lines)}
    except (UnicodeDecodeError, OSError) as error:
        raise DiffRateError(
            f"class map {file} cannot be read: it is a text file with one folder name a line"
        ) from error
