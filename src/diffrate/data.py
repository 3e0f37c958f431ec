"""Images: the one place that reads them.

timm finds the files, decodes and transforms them (folders, `hfds/…`, `wds/…`, `torch/…`). What this adds is that
nothing goes wrong in silence: a split that does not exist, labels that do not belong to the model, and an image that
cannot be read, which timm would replace by the next one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import (
    ImageDataset,
    add_img_extensions,
    create_dataset,
    create_loader,
    create_transform,
    resolve_data_config,
)
from timm.data.readers.reader_image_folder import ReaderImageFolder
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from diffrate.class_map import read_class_map
from diffrate.errors import DiffRateError, shown
from diffrate.models import first_line, input_size
from diffrate.outputs import class_count

MORE_EXTENSIONS = (".webp", ".bmp", ".tif", ".tiff")  # timm alone knows png, jpg and jpeg
EVAL_SPLITS = ("validation", "valid", "val", "eval", "evaluation")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
MOST_WORKERS = 256
LARGEST_BATCH = 1 << 20
SMALLEST_CROP = 0.05  # of a side: images are resized to the model's size divided by it
LONGEST_SHAPE = 200  # times as long as high: nothing that looks at squares sees anything in longer ones
TRAIN_SPLITS = ("train", "training", "search")


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


class FirstImages:
    """A loader that ends after the first `count` images, for datasets that cannot be asked for chosen ones."""

    def __init__(self, loader: Any, count: int) -> None:
        self.loader, self.count = loader, count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        left = self.count
        for images, targets in self.loader:
            yield images[:left], targets[:left]
            left -= len(images)
            if left <= 0:
                return


class WholeStream:
    """A loader over a stream that raises when a pass gives fewer images than the dataset declares.

    Stream readers log the samples that they cannot read and go on, so that their number is the only trace.
    """

    def __init__(self, loader: Any, declared: int) -> None:
        self.loader = loader
        self.declared = declared

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        seen = 0
        for images, targets in self.loader:
            seen += len(images)
            yield images, targets
        if seen < self.declared:
            raise UnreadableImageError(
                f"only {seen} of the {self.declared} images that the dataset declares could be read"
            )


def build_loader(
    model: nn.Module,
    data_dir: str | Path | None = None,
    dataset: str = "",
    split: str | None = None,
    batch_size: int = 64,
    workers: int = 2,
    img_size: int | tuple[int, int] | None = None,
    crop_pct: float | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    interpolation: str | None = None,
    class_map: str | None = None,
    labels: bool = True,
    device: torch.device | str = "cpu",
    most: int | None = None,
) -> Any:
    """An evaluation loader of (images, labels) on `device`, in a fixed order, with the model's own preprocessing.

    Folders hold one folder a class. Names that are numbers of one width (`000` … `999`) are the class indices;
    other names are numbered in sorted order. `labels=False` reads any folder of images, flat or nested.
    `most` limits the images: of folders evenly spread, of other datasets the first.
    """
    if not 1 <= batch_size <= LARGEST_BATCH or not 0 <= workers <= MOST_WORKERS:
        raise DiffRateError(
            f"batch size must be from 1 to {LARGEST_BATCH} and workers from 0 to {MOST_WORKERS}"
        )
    config = preprocessing(model, img_size, crop_pct, mean, std, interpolation)
    images = build_dataset(
        data_dir, dataset, split, class_map, labels, batch_size=batch_size, mode=image_mode(config)
    )
    if labels:
        _check_labels(images, model)
    if most is not None and isinstance(images, Images):
        images.spread(most)
    loader = create_loader(
        images,
        batch_size=batch_size,
        num_workers=workers,
        device=torch.device(device),
        pin_memory=torch.device(device).type == "cuda",
        persistent_workers=False,
        **config,
    )
    if most is not None and not isinstance(images, Images):
        return FirstImages(loader, most)
    if isinstance(images, IterableDataset):
        return WholeStream(loader, getattr(images.reader, "num_samples", None) or 0)  # type: ignore[attr-defined]
    return loader


def preprocessing(
    model: nn.Module,
    img_size: int | tuple[int, int] | None = None,
    crop_pct: float | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    interpolation: str | None = None,
) -> dict[str, Any]:
    """Image size, crop and normalisation: what is given, the rest as the model's weights were trained."""
    for name, value in (("mean", mean), ("std", std)):
        if value is not None and len(value) not in (1, 3):
            raise DiffRateError(f"{name} takes one number or three, not {len(value)}")
        least = 1e-6 if name == "std" else -1e6
        if value is not None and not all(least <= number <= 1e6 for number in value):
            raise DiffRateError(f"{name} of the normalisation cannot be {', '.join(f'{v:g}' for v in value)}")
    if crop_pct is not None and not SMALLEST_CROP <= crop_pct <= 2:
        raise DiffRateError(f"crop_pct is a fraction from {SMALLEST_CROP} to 2 such as 0.9, not {crop_pct:g}")
    if interpolation is not None and interpolation not in INTERPOLATIONS:
        raise DiffRateError(
            f"interpolation is one of {', '.join(INTERPOLATIONS)}, not {shown(interpolation)}"
        )
    size = (img_size, img_size) if isinstance(img_size, int) else img_size or input_size(model)
    given = {"crop_pct": crop_pct, "mean": mean, "std": std, "interpolation": interpolation}
    config: dict[str, Any] = resolve_data_config(
        {"input_size": (_channels(model), *size), **given}, model=model
    )
    return config


def plain_transform(config: Mapping[str, Any]) -> Callable[[Image.Image], Any]:
    """What an evaluation does to an image, from the values of `preprocessing`."""
    names = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
    made: Callable[[Image.Image], Any] = create_transform(
        is_training=False, **{name: config[name] for name in names}
    )
    return made


def augmenting(**arguments: Any) -> Callable[[Image.Image], Any]:
    """timm's transform for training, of which one image in 600 would fail.

    RandAugment's full magnitude posterizes to 0 bits, which Pillow no longer does: just below it, to 1 bit.
    """
    made = create_transform(is_training=True, **arguments)
    for part in made.transforms:
        for operation in getattr(part, "ops", []):
            operation.magnitude_max = min(operation.magnitude_max or 10, 9.999)
    augment: Callable[[Image.Image], Any] = made
    return augment


def image_mode(config: Mapping[str, Any]) -> str:
    return "L" if config["input_size"][0] == 1 else "RGB"


def build_dataset(
    data_dir: str | Path | None,
    dataset: str = "",
    split: str | None = None,
    class_map: str | None = None,
    labels: bool = True,
    *,
    batch_size: int = 1,
    mode: str = "RGB",
    usual: tuple[str, ...] = EVAL_SPLITS,
) -> Any:
    """The images behind timm's `--data-dir --dataset --split` flags; `usual` are the splits to look for without one."""
    root = data_dir
    if dataset and "/" not in dataset:
        raise DiffRateError(
            f"a dataset is named hfds/…, wds/… or torch/…, unlike {shown(dataset)}: leave it out to read folders"
        )
    if not dataset:
        if data_dir is None:
            raise DiffRateError("give --data-dir, the folder with the images")
        root = find_folder(Path(data_dir), split, usual)
    classes = None if class_map is None else read_class_map(class_map, root)
    add_img_extensions(MORE_EXTENSIONS)
    try:
        found = create_dataset(
            dataset,
            root=None if root is None else str(root),
            split=split or usual[0],
            search_split=False,
            class_map=classes,  # type: ignore[arg-type]  # None is timm's own default
            batch_size=batch_size,
            input_img_mode=mode,
        )
    except (
        Exception,
        SystemExit,
    ) as error:  # readers raise anything, from AssertionError to a missing package's
        if "Found 0 images" in str(error):
            raise DiffRateError(f"{root} holds no images") from error
        raise DiffRateError(f"cannot open the dataset {dataset or root}: {first_line(error)}") from error
    if not isinstance(found, ImageDataset):
        return found
    if labels and "" in found.reader.class_to_idx:
        raise DiffRateError(
            f"{root} has images outside of class folders: give each class a folder of its own"
        )
    return Images(found, labels)


def find_folder(data_dir: Path, split: str | None, usual: tuple[str, ...] = EVAL_SPLITS) -> Path:
    """The folder of a split: the one of that name, or without a name the first usual one, if there is one."""
    if not data_dir.exists():
        raise DiffRateError(f"data folder {data_dir} does not exist")
    if not data_dir.is_dir():  # timm would read an archive, and a pickled list of what is in it
        raise DiffRateError(f"{data_dir} is no folder: give --data-dir, the folder with the images")
    if split is not None:
        if not split or not (data_dir / split).is_dir():
            raise DiffRateError(f"data folder {data_dir} has no split {shown(split)}")
        return data_dir / split
    return next((data_dir / name for name in usual if (data_dir / name).is_dir()), data_dir)


def class_indices(class_to_idx: Mapping[str, int]) -> dict[int, int]:
    """The class index for each position of a class folder in sorted order, where the folders' names say one.

    timm numbers the folders it finds, so that a subset of `000` … `999` would get the wrong labels.
    """
    names = list(class_to_idx)
    numbers = all(isinstance(name, str) and name.isdecimal() for name in names)
    if not numbers or len({len(name) for name in names}) != 1:
        return {}
    return {position: int(name) for name, position in class_to_idx.items()}


def _check_labels(images: Any, model: nn.Module) -> None:
    classes = class_count(model)
    if classes < 1:
        raise DiffRateError("the model has no classifier, so it cannot be evaluated on labels")
    class_to_idx = getattr(getattr(images, "reader", None), "class_to_idx", None) or {}
    if not class_to_idx:
        return
    named = getattr(images, "class_of", {})
    highest = max(named.values(), default=max(class_to_idx.values()))
    if highest >= classes:
        raise DiffRateError(
            f"the data has {len(class_to_idx)} classes, the highest with index {highest}, "
            f"but the model has only {classes}"
        )
    if not named and len(class_to_idx) < classes:
        warnings.warn(
            f"the data has {len(class_to_idx)} classes and the model {classes}: class folders are numbered in sorted "
            "order, which is right only when no class before the last one is missing",
            stacklevel=3,
        )


def _channels(model: nn.Module) -> int:
    projection = getattr(getattr(model, "patch_embed", None), "proj", None)
    if isinstance(projection, nn.Conv2d):
        return projection.in_channels
    return int(getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224))[0])


def search_datasets(
    model: nn.Module,
    data_dir: str | Path | None = None,
    dataset: str = "",
    split: str | None = None,
    labels: bool = False,
    heavy: bool = False,
    img_size: int | tuple[int, int] | None = None,
    crop_pct: float | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    interpolation: str | None = None,
    class_map: str | None = None,
    most: int = 10_000,
) -> tuple[Any, Any]:
    """The images of a search twice: augmented, and as an evaluation sees them.

    Light augmentation is a crop of at least a third of the image and mirroring; `heavy` is the paper's: small crops,
    RandAugment(9, 0.5) and random erasing. Without a split, the training images. Of a stream the first `most`.
    """
    config = preprocessing(model, img_size, crop_pct, mean, std, interpolation)
    shared: dict[str, Any] = {name: config[name] for name in ("input_size", "interpolation", "mean", "std")}
    light = {"scale": (0.35, 1.0), "color_jitter": None, "re_prob": 0.0}
    strong = {
        "auto_augment": "rand-m9-mstd0.5-inc1",
        "color_jitter": None,
        "re_prob": 0.25,
        "re_mode": "pixel",
    }
    augment = augmenting(**shared, **(strong if heavy else light))
    plain = plain_transform(config)
    mode = image_mode(config)
    found = build_dataset(data_dir, dataset, split, class_map, labels, mode=mode, usual=TRAIN_SPLITS)
    if labels:
        _check_labels(found, model)
    if isinstance(found, IterableDataset):
        found = [pair for pair, _ in zip(found, range(most), strict=False)]
    return Transformed(found, augment), Transformed(found, plain)


def training_datasets(
    model: nn.Module,
    data_dir: str | Path | None = None,
    dataset: str = "",
    split: str | None = None,
    val_split: str | None = None,
    rand_augment: int = 9,
    color_jitter: float = 0.3,
    erasing: float = 0.25,
    smallest_crop: float = 0.08,
    img_size: int | tuple[int, int] | None = None,
    crop_pct: float | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    interpolation: str | None = None,
    class_map: str | None = None,
) -> tuple[Any, Any]:
    """The images of a training, augmented as DeiT does, and those that choose its best epoch, as an evaluation does."""
    config = preprocessing(model, img_size, crop_pct, mean, std, interpolation)
    shared: dict[str, Any] = {name: config[name] for name in ("input_size", "interpolation", "mean", "std")}
    augment = augmenting(
        scale=(smallest_crop, 1.0),
        auto_augment=f"rand-m{rand_augment}-mstd0.5-inc1" if rand_augment else None,
        color_jitter=color_jitter,
        re_prob=erasing,
        re_mode="pixel",
        **shared,
    )
    plain = create_transform(
        is_training=False, crop_pct=config["crop_pct"], crop_mode=config["crop_mode"], **shared
    )
    mode = image_mode(config)
    sets = []
    for name, usual, transform in ((split, TRAIN_SPLITS, augment), (val_split, EVAL_SPLITS, plain)):
        found = build_dataset(data_dir, dataset, name, class_map, mode=mode, usual=usual)
        if isinstance(found, IterableDataset):
            raise DiffRateError(
                "training reads images in any order, which a stream cannot give: use folders or hfds/"
            )
        _check_labels(found, model)
        sets.append(Transformed(found, transform))
    return sets[0], sets[1]


class Transformed(Dataset[tuple[Any, int]]):
    """Images of a dataset through a transform; several views may share one dataset."""

    def __init__(self, images: Any, transform: Callable[[Image.Image], Any]) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self.images[index]
        return self.transform(image), int(label)
