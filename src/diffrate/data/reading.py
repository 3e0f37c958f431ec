"""Reading one image: what can be decoded, in the mode that a model takes, or an error that names the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import ImageDataset
from timm.data.readers.reader_image_folder import ReaderImageFolder
from torch.utils.data import Dataset

from diffrate.data.transforms import image_mode, plain_transform
from diffrate.errors import DiffRateError
from diffrate.models import first_line

LONGEST_SHAPE = 200  # times as long as high: nothing that looks at squares sees anything in longer ones


class UnreadableImageError(DiffRateError):
    """An image file that cannot be decoded."""

    def __init__(self, message: str) -> None:
        # A loader's worker process hands its error over as a printed traceback; our sentence is its last line.
        super().__init__(
            message.strip().rsplit("\n", 1)[-1].removeprefix(f"{__name__}.UnreadableImageError: ")
        )


class Images(Dataset[tuple[Any, int]]):
    """A timm dataset that reads the image it was asked for or raises; `labels=False` gives -1 for every label."""

    def __init__(self, dataset: ImageDataset, labels: bool = True) -> None:
        self.reader = dataset.reader
        self.mode = dataset.input_img_mode
        self.labels = labels
        self.class_of = class_indices(self.reader.class_to_idx) if labels else {}
        self.transform: Callable[[Image.Image], Any] | None = None
        self.chosen: Sequence[int] = range(len(self.reader))

    def spread(self, count: int) -> None:
        """Be no more than `count` images, evenly spread, so that every class keeps its share."""
        total = len(self)
        if count < total:
            places = torch.linspace(0, total - 1, count).round().long().tolist()
            self.chosen = [self.chosen[place] for place in places]

    def file_name(self, index: int) -> str:
        return str(self.reader.filename(self.chosen[index], basename=True))

    def class_names(self) -> dict[int, str]:
        """The folder's name for each class index that has one."""
        return {
            self.class_of.get(index, index): str(name) for name, index in self.reader.class_to_idx.items()
        }

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        place = self.chosen[index]
        with naming(lambda: self.reader.filename(place, absolute=True)):
            if isinstance(self.reader, ReaderImageFolder):
                check_regular(self.reader.filename(place, absolute=True))
            file, target = self.reader[place][:2]
            with file, Image.open(file) as opened:
                image = decoded(opened, self.mode)
        label = self.class_of.get(target, target) if self.labels else -1
        return (image if self.transform is None else self.transform(image)), label


class ImageFiles(Dataset[Any]):
    """Single image files as an evaluation with these values of `preprocessing` reads them."""

    def __init__(self, files: Sequence[str | Path], config: Mapping[str, Any]) -> None:
        self.files = [Path(file) for file in files]
        self.mode = image_mode(config)
        self.transform = plain_transform(config)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.image(index))

    def image(self, index: int) -> Image.Image:
        """The file's own pixels; UnreadableImageError where there are none."""
        with naming(lambda: self.files[index]):
            check_regular(self.files[index])
            with Image.open(self.files[index]) as opened:
                return decoded(opened, self.mode)


def check_regular(path: str | Path) -> None:
    """A named pipe in a folder of images would be waited for without end."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise ValueError("not a file")


def decoded(opened: Image.Image, mode: str) -> Image.Image:
    """The pixels of the first frame. Sixteen bits become eight by dividing, where PIL would cut off all above 255."""
    longest, shortest = max(opened.size), min(opened.size)
    if longest > LONGEST_SHAPE * shortest:  # made as high as the model wants, it would be wider than memory
        raise ValueError(f"its sides are {opened.width} and {opened.height} pixels")
    if opened.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8)).convert(mode)
    return opened.convert(mode)


@contextmanager
def naming(file: Callable[[], object]) -> Iterator[None]:
    """Say which file it was that could not be read, and why, in one sentence."""
    try:
        yield
    except Exception as error:  # a broken file raises whatever its decoder raises
        unknown = isinstance(error, Image.UnidentifiedImageError)
        said = error.strerror if isinstance(error, OSError) else None
        reason = "not a known image format" if unknown else said or first_line(error)
        name = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(file()))
        raise UnreadableImageError(f"cannot read the image {name}: {' '.join(reason.split())}") from None


def class_indices(class_to_idx: Mapping[str, int]) -> dict[int, int]:
    """The class index for each position of a class folder in sorted order, where the folders' names say one.

    timm numbers the folders it finds, so that a subset of `000` … `999` would get the wrong labels.
    """
    names = list(class_to_idx)
    numbers = all(isinstance(name, str) and name.isdecimal() for name in names)
    if not numbers or len({len(name) for name in names}) != 1:
        return {}
    return {position: int(name) for name, position in class_to_idx.items()}
