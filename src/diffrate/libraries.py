"""Models of libraries other than timm by name: transformers:…, torchvision:… and openclip:….

transformers and OpenCLIP are optional; without them a name that needs one ends in the sentence that says what to
install.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

from diffrate.errors import DiffRateError

EXTRAS = {
    "transformers": "hf",
    "open_clip": "openclip",
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "export"),
}

Create = Callable[[str, bool, int | None, tuple[int, int] | None, dict[str, Any]], nn.Module]


def split_name(name: str) -> tuple[str, str]:
    """`library:name` in two; timm where no library of this list is named."""
    library, colon, rest = name.partition(":")
    return (library, rest) if colon and library in CREATORS else ("timm", name)


def create(
    library: str,
    name: str,
    pretrained: bool,
    num_classes: int | None,
    img_size: tuple[int, int] | None,
    model_kwargs: dict[str, Any],
) -> nn.Module:
    """A model of one of the libraries in CREATORS, with the preprocessing that it wants in `pretrained_cfg`."""
    return CREATORS[library](name, pretrained, num_classes, img_size, model_kwargs)


def optional(package: str) -> ModuleType:
    """Import a package that not everyone has."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise DiffRateError(
            f"{package} is not installed: pip install 'diffrate[{EXTRAS[package]}]' brings it"
        ) from None


def _side(img_size: tuple[int, int], library: str) -> int:
    if img_size[0] != img_size[1]:
        raise DiffRateError(f"{library} builds its models for square images")
    return img_size[0]


def _transformers(
    name: str,
    pretrained: bool,
    num_classes: int | None,
    img_size: tuple[int, int] | None,
    kwargs: dict[str, Any],
) -> nn.Module:
    """A class of transformers (transformers:ViTForImageClassification), or a folder or hub name with a config."""
    transformers: Any = optional("transformers")
    if num_classes is not None:
        kwargs["num_labels"] = num_classes
    if img_size is not None:
        kwargs["image_size"] = _side(img_size, "transformers")
    model: Any
    if name.isidentifier() and hasattr(transformers, name):
        if pretrained:
            raise DiffRateError(
                f"{name} is a class without weights: give a folder or the name of a repository"
            )
        model_class = getattr(transformers, name)
        model = model_class(model_class.config_class(**kwargs))
    else:
        auto = transformers.AutoModelForImageClassification
        if pretrained:
            model = auto.from_pretrained(name, **kwargs)
        else:
            model = auto.from_config(transformers.AutoConfig.from_pretrained(name, **kwargs))
    config = getattr(model.config, "vision_config", model.config)
    model.pretrained_cfg = {"input_size": (config.num_channels, config.image_size, config.image_size)}
    if pretrained:
        processor = transformers.AutoImageProcessor.from_pretrained(name)
        model.pretrained_cfg.update(mean=tuple(processor.image_mean), std=tuple(processor.image_std))
    return model


def _torchvision(
    name: str,
    pretrained: bool,
    num_classes: int | None,
    img_size: tuple[int, int] | None,
    kwargs: dict[str, Any],
) -> nn.Module:
    from torchvision import models

    if name not in models.list_models():
        raise DiffRateError(f"torchvision knows no model {name!r}")
    if num_classes is not None:
        kwargs["num_classes"] = num_classes
    if img_size is not None:
        kwargs["image_size"] = _side(img_size, "torchvision")
    model: Any = models.get_model(name, weights="DEFAULT" if pretrained else None, **kwargs)
    model.pretrained_cfg = {
        "input_size": (3, *[getattr(model, "image_size", 224)] * 2),
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "interpolation": "bilinear",
    }
    return model


def _openclip(
    name: str,
    pretrained: bool,
    num_classes: int | None,
    img_size: tuple[int, int] | None,
    kwargs: dict[str, Any],
) -> nn.Module:
    """The vision tower of an OpenCLIP model: openclip:ViT-B-32, openclip:ViT-B-32@laion2b_s34b_b79k."""
    open_clip: Any = optional("open_clip")
    if num_classes is not None:
        raise DiffRateError("an OpenCLIP tower gives an embedding: it has no classes to choose")
    architecture, _, tag = name.partition("@")
    if architecture not in open_clip.list_models():
        raise DiffRateError(f"OpenCLIP knows no model {architecture!r}")
    if pretrained and not tag:
        raise DiffRateError(f"say which weights: openclip:{architecture}@TAG")
    if img_size is not None:
        kwargs["force_image_size"] = img_size
    clip = open_clip.create_model(architecture, pretrained=tag if pretrained else None, **kwargs)
    tower: Any = clip.visual
    if hasattr(tower, "trunk"):  # a timm model, which knows its preprocessing
        trunk: nn.Module = tower.trunk
        return trunk
    preprocessing = tower.preprocess_cfg
    tower.pretrained_cfg = {
        "input_size": (3, *tower.image_size),
        "mean": preprocessing["mean"],
        "std": preprocessing["std"],
    }
    made: nn.Module = tower
    return made


CREATORS: dict[str, Create] = {
    "transformers": _transformers,
    "torchvision": _torchvision,
    "openclip": _openclip,
}
