"""Images: the one place that reads them.

timm finds the files, decodes and transforms them (folders, `hfds/…`, `wds/…`, `torch/…`). What this adds is that
nothing goes wrong in silence: a split that does not exist, labels that do not belong to the model, and an image that
cannot be read, which timm would replace by the next one.
"""

from diffrate.data.folders import build_dataset
from diffrate.data.loader import LARGEST_BATCH, MOST_WORKERS, build_loader
from diffrate.data.reading import ImageFiles, Images, UnreadableImageError, naming
from diffrate.data.sets import search_datasets, training_datasets
from diffrate.data.transforms import augmenting, plain_transform, preprocessing, rand_augment

__all__ = [
    "LARGEST_BATCH",
    "MOST_WORKERS",
    "ImageFiles",
    "Images",
    "UnreadableImageError",
    "augmenting",
    "build_dataset",
    "build_loader",
    "naming",
    "plain_transform",
    "preprocessing",
    "rand_augment",
    "search_datasets",
    "training_datasets",
]
