"""Training of models, with a schedule or without: fine-tuning a compressed one, or one from scratch."""

from diffrate.training.loop import Trained, accuracy, finetune, train
from diffrate.training.recipe import DEIT, EMBEDDED, FINETUNE, Recipe

__all__ = ["DEIT", "EMBEDDED", "FINETUNE", "Recipe", "Trained", "accuracy", "finetune", "train"]
