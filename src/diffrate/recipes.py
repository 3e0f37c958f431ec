"""How to build a model again: its name, input and arguments, read off the model, and read back with suspicion.

A recipe comes from files that strangers may have made. So it is data alone: a name that a library lists, and arguments
that shape a model. Nothing in it can name a file, a download or a class that is not a model.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import timm
import torch
from torch import nn
from torchvision.models import get_model_builder, list_models

from diffrate.backbones import backbone_of
from diffrate.errors import DiffRateError, shown
from diffrate.libraries import optional, split_name
from diffrate.models import load_model

# What may shape a model of timm. Never to be among them: checkpoint_path, pretrained, pretrained_cfg, cache_dir.
TIMM_ARGUMENTS = {
    "patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias", "qk_norm", "init_values",
    "global_pool", "class_token", "reg_tokens", "no_embed_class", "pre_norm", "final_norm", "fc_norm", "pos_embed",
    "dynamic_img_size", "dynamic_img_pad", "drop_rate", "drop_path_rate", "proj_drop_rate", "attn_drop_rate",
    "use_rot_pos_emb", "use_abs_pos_emb", "use_rel_pos_bias", "use_shared_rel_pos_bias", "skip_lam",
    "qkv_fused", "swiglu_mlp", "scale_mlp", "scale_attn_inner", "act_layer", "norm_layer",
}  # fmt: skip
TORCHVISION_ARGUMENTS = {"dropout", "attention_dropout", "representation_size"}
OPENCLIP_ARGUMENTS: set[str] = set()
LARGEST = 1 << 16  # of a number that shapes a model


@dataclass(frozen=True)
class Recipe:
    """The arguments of diffrate.models.load_model, without weights."""

    model: str
    num_classes: int | None = None
    img_size: tuple[int, int] | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        return load_model(
            self.model,
            num_classes=self.num_classes,
            img_size=self.img_size,
            model_kwargs=self.model_kwargs,
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "img_size": None if self.img_size is None else list(self.img_size)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """A recipe out of a file; DiffRateError for one that a model would not have written."""
        name, kwargs = values.get("model"), values.get("model_kwargs", {})
        classes, size = values.get("num_classes"), values.get("img_size")
        if not isinstance(name, str) or not isinstance(kwargs, dict):
            raise DiffRateError("it names no model")
        if classes is not None and not _is_count(classes, 0):
            raise DiffRateError(f"num_classes is {shown(classes)}")
        if size is not None:
            if not isinstance(size, list) or len(size) != 2 or not all(_is_count(side, 1) for side in size):
                raise DiffRateError("img_size must be [height, width] in pixels")
            size = (size[0], size[1])
        _check_name(name)
        _check_arguments(name, kwargs)
        return cls(name, classes, size, kwargs)


def recipe_of(
    model: nn.Module, name: str | None = None, model_kwargs: dict[str, Any] | None = None
) -> Recipe:
    """How to build `model` again, as far as the model itself knows; `name` and `model_kwargs` where it does not."""
    backbone = backbone_of(model)
    library = backbone.library if name is None else split_name(name)[0]
    classes = getattr(model, "num_classes", None)
    size = backbone.layout.img_size
    match library:
        case "transformers":
            return Recipe(
                name or f"transformers:{type(model).__name__}", None, None, config_values(model.config)
            )
        case "torchvision":
            found = name or f"torchvision:{_torchvision_name(model)}"
            return Recipe(found, _out_features(model), size, model_kwargs or {})
        case "open_clip" | "openclip":
            if name is None:
                raise DiffRateError("an OpenCLIP tower does not know its name: say model='openclip:NAME'")
            return Recipe(name, None, size, model_kwargs or {})
    name = name or getattr(model, "pretrained_cfg", {}).get("architecture")
    if not name or not timm.is_model(name):
        raise DiffRateError(f"this {type(model).__name__} does not know its timm name: say model='NAME'")
    recipe = Recipe(name.split(".")[0], classes, size, model_kwargs or {})
    return recipe if model_kwargs is not None else _with_what_differs(recipe, model)


def _with_what_differs(recipe: Recipe, model: nn.Module) -> Recipe:
    """timm forgets the arguments of create_model: those that show in the model are found by comparing."""
    with torch.device("meta"):  # shapes without memory
        usual = _shape(timm.create_model(recipe.model))
    found = {name: value for name, value in _shape(model).items() if usual.get(name) != value}
    return dataclasses.replace(recipe, model_kwargs=found)


def _shape(model: Any) -> dict[str, Any]:
    """The arguments of create_model that a model's parts tell."""
    shape: dict[str, Any] = {}
    if hasattr(model, "blocks"):
        attention = model.blocks[0].attn
        shape = {"embed_dim": model.embed_dim, "depth": len(model.blocks), "num_heads": attention.num_heads}
        shape["patch_size"] = model.patch_embed.patch_size[0]
    first: Any = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if first is not None:
        shape["in_chans"] = first.in_channels
    for name in ("global_pool", "dynamic_img_size"):
        if isinstance(getattr(model, name, None), str | bool):
            shape[name] = getattr(model, name)
    return shape


def _torchvision_name(model: Any) -> str:
    want = (model.patch_size, model.hidden_dim, len(model.encoder.layers))
    for name in list_models(include="vit_*"):
        with torch.device("meta"):
            built: Any = get_model_builder(name)()
        if (built.patch_size, built.hidden_dim, len(built.encoder.layers)) == want:
            return name
    raise DiffRateError("this is none of torchvision's ViTs: say model='torchvision:NAME'")


def _out_features(model: Any) -> int:
    last = [m for m in model.heads.modules() if isinstance(m, nn.Linear)][-1]
    return int(last.out_features)


# --- transformers: the configuration is the recipe ----------------------------------------------------------------


def config_values(config: Any) -> dict[str, Any]:
    """The fields that shape a model of transformers, those of its towers included."""
    values = {name: getattr(config, name, None) for name in _own_fields(type(config))}
    return {
        name: config_values(value) if dataclasses.is_dataclass(value) else value
        for name, value in values.items()
        if value is not None
    }


def _own_fields(config_class: Any) -> set[str]:
    """Fields of this kind of model and the names of its classes: not how and from where it is to be loaded."""
    base: Any = optional("transformers").PretrainedConfig
    everywhere = {f.name for f in dataclasses.fields(base)} - {"id2label", "label2id"}
    return {f.name for f in dataclasses.fields(config_class) if not f.name.startswith("_")} - everywhere


def _check_config(config_class: Any, values: dict[str, Any]) -> None:
    known, towers = _own_fields(config_class), getattr(config_class, "sub_configs", {})
    for name, value in values.items():
        if name not in known:
            raise DiffRateError(f"{config_class.__name__} has no field {shown(name)} that a file may set")
        if name in towers and isinstance(value, dict):
            _check_config(towers[name], value)
        elif name not in ("id2label", "label2id"):
            _check_plain(name, value)


# --- suspicion ----------------------------------------------------------------------------------------------------


def _check_name(name: str) -> None:
    library, own = split_name(name)
    known = False
    if library == "timm":
        known = ":" not in name and timm.is_model(
            name
        )  # "hf-hub:…" and "local-dir:…" would load what they name
    elif library == "transformers":
        transformers: Any = optional("transformers")
        model_class = getattr(transformers, own, None) if own.isidentifier() else None
        known = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    elif library == "torchvision":
        known = own in list_models(include="vit_*")
    else:
        known = own in optional("open_clip").list_models()
    if not known:
        raise DiffRateError(f"{library} knows no model {shown(own)}")


def _check_arguments(name: str, kwargs: dict[str, Any]) -> None:
    library, own = split_name(name)
    if library == "transformers":
        config_class = getattr(optional("transformers"), own).config_class
        _check_config(config_class, kwargs)
        return
    allowed = {"timm": TIMM_ARGUMENTS, "torchvision": TORCHVISION_ARGUMENTS}.get(library, OPENCLIP_ARGUMENTS)
    for key, value in kwargs.items():
        if key not in allowed:
            raise DiffRateError(f"{shown(key)} is no argument that a saved model may have")
        _check_plain(key, value)


def _check_plain(name: str, value: Any) -> None:
    """Text, truth values, small numbers, and lists of them."""
    if isinstance(value, list | tuple):
        for each in value:
            _check_plain(name, each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value) or abs(value) > LARGEST:
            raise DiffRateError(f"{shown(name)} is {shown(value)}")
    elif not (value is None or isinstance(value, bool) or (isinstance(value, str) and len(value) < 100)):
        raise DiffRateError(f"{shown(name)} must be text, a truth value or a number, not {shown(value)}")


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= LARGEST * 16
