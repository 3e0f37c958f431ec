"""What `diffrate finetune` left in a folder, read back: a method or a schedule, and the weights trained under it."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from diffrate.compressed import CompressedModel, compress
from diffrate.errors import DiffRateError, shown
from diffrate.methods import METHODS
from diffrate.models import what_does_not_fit
from diffrate.schedule import Schedule
from diffrate.training.loop import BEST, METHOD

CONFIG = "config.json"


def read_trained(folder: str | os.PathLike[str], model: nn.Module) -> CompressedModel:
    """The model of a folder that `finetune` wrote, in evaluation mode, with weights of its own.

    model  one of the same architecture, which is left as it is; its own weights do not matter.
    """
    folder = Path(folder)
    made = _under(_read(folder / CONFIG), copy.deepcopy(model), folder)
    try:
        made.load_state_dict(load_file(folder / BEST))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise DiffRateError(f"{folder / BEST} does not fit: {what_does_not_fit(error)}") from error
    return made.eval()


def name_of(model: CompressedModel, folder: str | os.PathLike[str]) -> str:
    """What a table calls a trained model, beside others whose weights are untouched: by its method, or its folder."""
    return f"{model.settings().get(METHOD, Path(folder).name)}, tuned"


def _under(config: dict[str, Any], model: nn.Module, folder: Path) -> CompressedModel:
    settings = config.get(METHOD)
    if settings is None and config.get("schedule") is not None:
        return compress(model, Schedule.from_dict(config["schedule"]))
    settings = settings if isinstance(settings, dict) else {}
    name = settings.get(METHOD)
    rebuild = METHODS[name].rebuild if isinstance(name, str) and name in METHODS else None
    if rebuild is None:
        raise DiffRateError(f"{folder / CONFIG} holds neither a schedule nor a method that is known here")
    try:
        return rebuild(model, settings)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DiffRateError(f"{folder / CONFIG} does not describe {shown(name)}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DiffRateError(f"{path.parent} holds no training: there is no {path.name}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DiffRateError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise DiffRateError(f"cannot read {path}: no object")
    return config
