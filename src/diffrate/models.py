"""Models by name, timm's and those of libraries.py, with weights from their library or from a checkpoint file.

The libraries do the work; this turns what can go wrong on the way (an unknown name, a missing or foreign checkpoint)
into one sentence each.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from timm.models import load_checkpoint
from torch import nn

from diffrate import embedded
from diffrate.errors import DiffRateError, shown
from diffrate.libraries import create, split_name

LARGEST_SIDE = 8192  # pixels: more would only ask for more memory than there is
ANY_SIZE = "caformer"  # how the names begin of models that are built without an input size


def load_model(
    model: str,
    checkpoint: str | Path | None = None,
    pretrained: bool = False,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A model in eval mode, by timm's name or as library:name; "embedded" is the one that ships with its weights.

    `checkpoint` (safetensors or torch weights) wins over `pretrained`.
    """
    if checkpoint is not None and not Path(checkpoint).is_file():
        raise DiffRateError(f"checkpoint {checkpoint} does not exist")
    sides = (img_size,) if isinstance(img_size, int) else img_size or (1,)
    if max(sides) > LARGEST_SIDE:
        raise DiffRateError(f"an image size is at most {LARGEST_SIDE} pixels, not {shown(max(sides))}")
    created = _create(
        model, pretrained and checkpoint is None, num_classes, img_size, dict(model_kwargs or {})
    )
    if checkpoint is not None:
        _load_weights(created, model, Path(checkpoint))
    return created.eval()


def input_size(model: nn.Module) -> tuple[int, int]:
    """Height and width the model was built for, in pixels."""
    # A model built with img_size=… keeps the default size in its pretrained_cfg, so its own embedding goes first.
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is None:
        size = getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224))[-2:]
    return int(size[0]), int(size[1])


def _create(
    name: str,
    pretrained: bool,
    num_classes: int | None,
    img_size: int | tuple[int, int] | None,
    model_kwargs: dict[str, Any],
) -> nn.Module:
    ships = name == embedded.NAME
    if ships and (num_classes is not None or img_size is not None):
        raise DiffRateError("the embedded model has ten classes and images of 28 pixels, and no others")
    library, own_name = split_name(name)
    if library == "timm" and ":" not in name and not ships and not timm.is_model(name):
        near = timm.list_models(f"*{name.split('.')[0]}*")[:3]
        hint = f"; near to it are {', '.join(near)}" if near else ""
        raise DiffRateError(f"timm knows no model {name!r}{hint}")
    try:
        if ships:
            return embedded.model(pretrained=True, **model_kwargs)
        if library != "timm":
            size = (img_size, img_size) if isinstance(img_size, int) else img_size
            return create(library, own_name, pretrained, num_classes, size, model_kwargs)
        created = create_timm(name, img_size, pretrained=pretrained, num_classes=num_classes, **model_kwargs)
    except DiffRateError:
        raise
    except (
        Exception
    ) as error:  # timm raises every kind of exception here: bad arguments, no network, no such tag
        hint = "; weights that are on disk already come by --checkpoint" if pretrained else ""
        raise DiffRateError(f"{library} could not build {name}: {first_line(error)}{hint}") from error
    return created


def create_timm(name: str, img_size: int | tuple[int, int] | None, **arguments: Any) -> nn.Module:
    """timm.create_model for an input size, also for models that take any."""
    if img_size is None or not name.startswith(ANY_SIZE):
        built: nn.Module = timm.create_model(name, img_size=img_size, **arguments)
        return built
    model: Any = timm.create_model(name, **arguments)
    size = (img_size, img_size) if isinstance(img_size, int) else img_size
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, *size)}
    made: nn.Module = model
    return made


def _load_weights(model: nn.Module, name: str, checkpoint: Path) -> None:
    # The family's own filter resizes position embeddings when the model was built for another image size.
    family = sys.modules[type(model).__module__]
    try:
        filter_fn = getattr(family, "checkpoint_filter_fn", None)
        # Older versions of timm would unpickle anything, which can run code.
        load_checkpoint(model, str(checkpoint), filter_fn=filter_fn, weights_only=True)
    except Exception as error:  # a corrupt file raises whatever its format's parser raises
        traceback.clear_frames(error.__traceback__)  # in which timm has left the file open
        raise DiffRateError(
            f"checkpoint {checkpoint} does not load into {name}: {what_does_not_fit(error)}"
        ) from error


def what_does_not_fit(error: Exception) -> str:
    """Torch lists every key that does not fit; the first ones say enough."""
    text = " ".join(str(error).split())
    _, found, keys = text.partition("Error(s) in loading state_dict for ")
    return shorten(keys.partition(": ")[2] if found else text or type(error).__name__, 300)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return shorten(lines[0], 300) if lines else type(error).__name__


def shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
