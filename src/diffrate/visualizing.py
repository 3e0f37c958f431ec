"""`diffrate.visualize`: pictures of what a compressed model does to images of your own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diffrate.compressed import CompressedModel
from diffrate.data import ImageFiles, preprocessing
from diffrate.errors import DiffRateError
from diffrate.pictures import FORMATS, encoded
from diffrate.schedule import write_bytes
from diffrate.token_maps import token_maps

AT_ONCE = 8  # images in a batch
LONGEST = 80  # characters of a file's name that its picture takes over


def visualize(
    model: CompressedModel,
    images: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    formats: Sequence[str] = ("png", "gif"),
    blocks: Sequence[int] | None = None,
    **images_as: Any,
) -> list[Path]:
    """Write a strip of panels (png) and animations (gif, webp) of each image to the folder `output`.

    blocks     for the strip: the blocks to show, numbered from 1; without any, all of them.
    images_as  img_size, crop_pct, mean, std, interpolation: as in an evaluation, the model's own where not given.

    Nothing is written when one of the images cannot be read.
    """
    for form in formats:
        if form not in FORMATS:
            raise DiffRateError(f"a picture is {', '.join(FORMATS)}, not {form!r}")
    if not images or not formats:
        raise DiffRateError("give at least one image and one format")
    depth = model.backbone.layout.depth
    for block in blocks or ():
        if not 1 <= block <= depth:
            raise DiffRateError(f"there is no block {block}: the model has blocks 1 to {depth}")
    config = preprocessing(model.original, **images_as)
    files = ImageFiles([Path(image) for image in images], config)
    for i in range(len(files)):
        files.image(i)
    written = []
    names = picture_names(files.files)
    for start in range(0, len(files), AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, len(files)))
        inputs = torch.stack([files[i] for i in numbers])
        for i, image in zip(numbers, token_maps(model, inputs, config["mean"], config["std"]), strict=True):
            for form in formats:
                path = Path(output) / f"{names[i]}.{form}"
                write_bytes(path, encoded(image, form, blocks, files.files[i].name))
                written.append(path)
    return written


def picture_names(files: Sequence[Path]) -> list[str]:
    """A name for the pictures of each file: its own with `-tokens`, without what file systems refuse, each one once."""
    names: list[str] = []
    for file in files:
        stem = "".join(c if c.isprintable() and c not in '/\\:*?"<>|' else "_" for c in file.stem)
        stem = stem.encode(errors="replace")[:LONGEST].decode(errors="ignore").strip(" .") or "image"
        name, number = f"{stem}-tokens", 1
        while name.casefold() in (other.casefold() for other in names):
            number += 1
            name = f"{stem}-{number}-tokens"
        names.append(name)
    return names
