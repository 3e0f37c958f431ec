"""Dense prediction: a segmentation model on a compressed backbone whose grids are restored (paper, appendix E)."""

from diffrate.dense.camvid import Scenes, load_scenes
from diffrate.dense.miou import SegmentationScore, evaluate_segmenter
from diffrate.dense.searching import search_segmenter
from diffrate.dense.segmenter import Segmenter, build_segmenter
from diffrate.dense.training import SegmentationRecipe, train_segmenter

__all__ = [
    "Scenes",
    "SegmentationRecipe",
    "SegmentationScore",
    "Segmenter",
    "build_segmenter",
    "evaluate_segmenter",
    "load_scenes",
    "search_segmenter",
    "train_segmenter",
]
