"""Fashion-MNIST from its idx files, and the choice of the images that ship with the package.

`python -m diffrate.embedded.build --source DIR` writes `search.npz` and `test.npz` anew. DIR holds the
four `*-ubyte.gz` files, which Debian installs with the package `dataset-fashion-mnist`.
"""

import gzip
import zlib
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from diffrate.embedded import CLASSES, FOLDER, SPLITS, ImageDataset
from diffrate.errors import DiffRateError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
STEMS = {"train": "train", "test": "t10k"}
HELD_OUT = 3_000  # training images the embedded model never trains on; the first third are the search images


def read_idx(path: Path) -> Tensor:
    """One gzipped idx file of unsigned bytes: two zeros, type, rank, the big-endian sizes, the data."""
    try:
        data = gzip.decompress(path.read_bytes())
    except FileNotFoundError:
        raise DiffRateError(
            f"{path} is missing: Fashion-MNIST needs its four *-ubyte.gz files there"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DiffRateError(f"{path} cannot be read as gzip: {error}") from None
    rank = data[3] if data[:3] == b"\0\0\x08" else 0
    shape = np.frombuffer(data, ">i4", rank, offset=4).tolist() if rank and len(data) >= 4 + 4 * rank else []
    if not shape or len(data) - 4 - 4 * rank != np.prod(shape):
        raise DiffRateError(f"{path} is not a complete idx file of unsigned bytes")
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * rank).reshape(shape).copy())


def read_fashion_mnist(source: Path, split: str) -> tuple[Tensor, Tensor]:
    """All images, uint8 (N, 28, 28), and labels (N,) of "train" (60,000) or "test" (10,000)."""
    images = read_idx(source / f"{STEMS[split]}-images-idx3-ubyte.gz")
    labels = read_idx(source / f"{STEMS[split]}-labels-idx1-ubyte.gz").long()
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1] or labels.max() >= len(CLASSES):
        raise DiffRateError(
            f"{source} does not hold Fashion-MNIST: {tuple(images.shape)} images in its {split} set"
        )
    return images, labels


def balanced(labels: Tensor, count: int, seed: int = 0) -> Tensor:
    """Indices of `count` images, equally many of each class in turn; a smaller choice begins a larger one."""
    per_class, rest = divmod(count, len(CLASSES))
    # numpy promises RandomState's stream for all versions: the same images wherever the model is trained
    order = torch.from_numpy(np.random.RandomState(seed).permutation(len(labels)))
    of_class = [order[labels[order] == c][:per_class] for c in range(len(CLASSES))]
    if rest or min(map(len, of_class)) < per_class:
        raise DiffRateError(
            f"{count} images cannot be chosen equally from {len(CLASSES)} classes of {len(labels)}"
        )
    return torch.stack(of_class, dim=1).flatten()


def training_sets(source: Path, held_out: int = HELD_OUT) -> tuple[ImageDataset, ImageDataset, ImageDataset]:
    """Fashion-MNIST for training, for choosing the best epoch (the held-out images), and for testing."""
    images, labels = read_fashion_mnist(source, "train")
    chosen = balanced(labels, held_out)
    rest = torch.ones(len(labels), dtype=torch.bool)
    rest[chosen] = False
    return (
        ImageDataset(images[rest], labels[rest]),
        ImageDataset(images[chosen], labels[chosen]),
        ImageDataset(*read_fashion_mnist(source, "test")),
    )


def build(source: Path = DEBIAN, output: Path = FOLDER) -> None:
    """Write `search.npz` and `test.npz` to `output`."""
    for split, origin in {"search": "train", "test": "test"}.items():
        images, labels = read_fashion_mnist(source, origin)
        chosen = balanced(labels, SPLITS[split])
        np.savez_compressed(
            output / f"{split}.npz",
            images=images[chosen].numpy(),
            labels=labels[chosen].to(torch.uint8).numpy(),
        )


def main(
    source: Annotated[Path, typer.Option(help="Folder with Fashion-MNIST's four *-ubyte.gz files.")] = DEBIAN,
    output: Annotated[Path, typer.Option(help="Folder to write to; the package itself by default.")] = FOLDER,
) -> None:
    """Make the image files of the embedded data set."""
    build(source, output)


if __name__ == "__main__":
    typer.run(main)
