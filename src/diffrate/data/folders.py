"""The images behind timm's `--data-dir --dataset --split` flags, and whether their labels are the model's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from timm.data import ImageDataset, add_img_extensions, create_dataset
from torch import nn

from diffrate import embedded
from diffrate.class_map import read_class_map
from diffrate.data.reading import Images
from diffrate.errors import DiffRateError, shown
from diffrate.models import first_line
from diffrate.outputs import class_count

MORE_EXTENSIONS = (".webp", ".bmp", ".tif", ".tiff")  # timm alone knows png, jpg and jpeg
EVAL_SPLITS = ("validation", "valid", "val", "eval", "evaluation")
TRAIN_SPLITS = ("train", "training", "search")


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
    """The images behind timm's `--data-dir --dataset --split` flags; `usual` are the splits to look for without one.

    dataset  as timm names them; "embedded" has the images that ship, "search" and "test".
    """
    root = data_dir
    if dataset == embedded.NAME:
        if data_dir is not None or class_map is not None:
            raise DiffRateError("the embedded images lie in no folder, and have classes of their own")
        usually = "search" if usual is TRAIN_SPLITS else "test"
        return embedded.Pictures(usually if split is None else split, labels, mode)
    if dataset and "/" not in dataset:
        raise DiffRateError(
            f"a dataset is named hfds/…, wds/…, torch/… or embedded, unlike {shown(dataset)}: leave it out to read "
            "folders"
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


def check_labels(images: Any, model: nn.Module) -> None:
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
