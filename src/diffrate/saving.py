"""A compressed model as a folder: weights in safetensors, everything else in JSON, and nothing that can run.

`config.json` holds the recipe of the model, its schedule with the operator, its preprocessing, and the digest of
`model.safetensors`, so that two files that do not belong together are noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialized

import diffrate
from diffrate.compressed import CompressedModel, compress
from diffrate.data import preprocessing
from diffrate.errors import DiffRateError, shown
from diffrate.models import what_does_not_fit
from diffrate.modes import evaluating
from diffrate.outputs import main_output
from diffrate.recipes import Recipe, recipe_of
from diffrate.schedule import Schedule

FORMAT = "diffrate.model"
VERSION = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
UNFINISHED = ".being-written."
LONGEST_CONFIG = 1 << 22  # bytes: names of classes are the longest part
PREPROCESSING = ("input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation")


def save(
    compressed: CompressedModel,
    folder: str | os.PathLike[str],
    *,
    model: str | None = None,
    model_kwargs: dict[str, Any] | None = None,
    data_config: dict[str, Any] | None = None,
) -> None:
    """Write a compressed model to `folder`, after making sure that `load` brings the same model back.

    model, model_kwargs  as for diffrate.models.load_model, where the model does not tell how it was built.
    data_config          preprocessing that differs from the model's own: mean, std, crop_pct, interpolation.
    """
    if not isinstance(compressed, CompressedModel):
        raise DiffRateError(f"save takes what diffrate.compress returns, not a {type(compressed).__name__}")
    if "schedule" not in compressed.settings():
        raise DiffRateError("only models under a schedule can be saved, and this one has a rule of its own")
    recipe = recipe_of(compressed.original, model, model_kwargs)
    state = {
        name: tensor.detach().cpu().contiguous().clone() for name, tensor in compressed.state_dict().items()
    }
    with landing(Path(folder)) as made:
        (made / WEIGHTS).write_bytes(serialized(state, metadata={"format": "pt"}))
        config = {
            "format": FORMAT,
            "version": VERSION,
            **recipe.to_dict(),
            "data_config": _data_config(compressed, data_config or {}),
            "schedule": replace(compressed.schedule, operator=compressed.operator).to_dict(),
            "weights_sha256": _digest(made / WEIGHTS),
            "made_with": {
                "diffrate": diffrate.__version__,
                "torch": torch.__version__,
                "timm": version("timm"),
            },
        }
        try:
            text = json.dumps(config, indent=2, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DiffRateError(f"cannot write how this model is built as JSON: {error}") from error
        (made / CONFIG).write_text(text + "\n", encoding="utf-8")
        _check_the_way_back(compressed, made)


def load(folder: str | os.PathLike[str]) -> CompressedModel:
    """The compressed model in a folder that `save` wrote, in evaluation mode on the CPU."""
    folder = Path(folder)
    config = _read_config(folder / CONFIG)
    try:
        recipe, schedule = Recipe.from_dict(config), Schedule.from_dict(config.get("schedule"))
        wanted = _checked_data_config(config.get("data_config"))
    except DiffRateError as error:
        raise DiffRateError(f"{folder / CONFIG}: {error}") from error
    state = _read_weights(folder / WEIGHTS, config.get("weights_sha256"))
    _check_depth(recipe, schedule, len(state), folder)
    model: Any = recipe.build()
    kinds = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if len(kinds) == 1:
        model.to(kinds.pop())
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise DiffRateError(
            f"{folder / WEIGHTS} does not fit {recipe.model}: {what_does_not_fit(error)}"
        ) from error
    model.pretrained_cfg = {**(getattr(model, "pretrained_cfg", None) or {}), **wanted}
    return compress(model, schedule).eval()


@contextmanager
def landing(target: Path) -> Iterator[Path]:
    """A folder inside `target` to write in; what is there at the end moves to `target`, at an error nothing is left."""
    new = [folder for folder in (target, *target.parents) if not folder.exists()]
    try:
        target.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=target, prefix=UNFINISHED))
        try:
            yield made
            for file in sorted(made.iterdir()):
                os.chmod(file, 0o644)
                os.replace(file, target / file.name)
            new.clear()
        finally:
            shutil.rmtree(made, ignore_errors=True)
            for folder in new:
                folder.rmdir()
    except OSError as error:
        asked = (
            target.parent if target.name.startswith(UNFINISHED) else target
        )  # an export lands what `save` landed
        raise DiffRateError(f"cannot write {asked}: {error.strerror or error}") from error


def _data_config(compressed: CompressedModel, given: dict[str, Any]) -> dict[str, Any]:
    layout = compressed.backbone.layout
    unknown = set(given) - set(PREPROCESSING)
    if unknown:
        raise DiffRateError(f"preprocessing has no {', '.join(sorted(map(shown, unknown)))}")
    checked = {name: given[name] for name in ("crop_pct", "mean", "std", "interpolation") if name in given}
    config = preprocessing(compressed.original, layout.img_size, **checked) | {
        "input_size": (layout.in_chans, *layout.img_size)
    }
    config |= given
    return {name: config[name] for name in PREPROCESSING if config.get(name) is not None}


def _checked_data_config(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict) or set(values) - set(PREPROCESSING):
        raise DiffRateError("data_config must be an object of " + ", ".join(PREPROCESSING))
    for name, value in values.items():
        if name in ("input_size", "mean", "std"):
            numbers = isinstance(value, list) and all(type(v) in (int, float) for v in value)
            fits = numbers and len(value) in (1, 3)
        elif name == "crop_pct":
            fits = type(value) in (int, float)
        else:
            fits = isinstance(value, str)
        if not fits:
            raise DiffRateError(f"{name} in data_config is {shown(value)}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(LONGEST_CONFIG + 1)
    except OSError as error:
        raise DiffRateError(f"cannot read {path}: {error.strerror or error}") from error
    if len(text) > LONGEST_CONFIG:
        raise DiffRateError(f"{path} is too large to describe a model")
    try:
        config = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise DiffRateError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise DiffRateError(f'{path} is no model of diffrate.save: it has no "format": "{FORMAT}"')
    if config.get("version") != VERSION or type(config["version"]) is not int:
        raise DiffRateError(
            f"{path} has version {shown(config.get('version'))}, and only {VERSION} is known here"
        )
    return config


def _read_weights(path: Path, digest: Any) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise DiffRateError(f"there is no {path}")
    try:
        if _digest(path) != digest:
            raise DiffRateError(f"{path} is damaged, or not the one that {CONFIG} was written with")
        state: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DiffRateError(f"cannot read {path}: {error}") from error
    return state


def _check_depth(recipe: Recipe, schedule: Schedule, tensors: int, folder: Path) -> None:
    """A model has more tensors than blocks: one that does not is not worth building."""
    depths = [recipe.model_kwargs.get(name) for name in ("depth", "num_hidden_layers")]
    if any(isinstance(depth, int) and depth > tensors for depth in [*depths, schedule.depth]):
        raise DiffRateError(f"{folder / CONFIG} has more blocks than {WEIGHTS} has weights")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _check_the_way_back(compressed: CompressedModel, folder: Path) -> None:
    """Load what was written and compare: a part of the model that its recipe does not know would be lost."""
    try:
        again = load(folder)
    except DiffRateError as error:
        reason = str(error).replace(f"{folder}{os.sep}", "")
        raise DiffRateError(
            f"this model cannot be built again from what it tells of itself ({reason}): pass model= and model_kwargs="
        ) from error
    layout = compressed.backbone.layout
    some = next(p for p in compressed.parameters() if p.is_floating_point())
    again.to(some.device)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, layout.in_chans, *layout.img_size, generator=generator).to(
        some.device, some.dtype
    )
    with torch.no_grad(), evaluating(compressed):
        for ours, theirs in (
            (compressed.forward_tokens(images).x, again.forward_tokens(images).x),
            (main_output(compressed(images)), main_output(again(images))),
        ):
            near = 1e-4 if some.dtype in (torch.float32, torch.float64) else 3e-2
            if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=near, atol=near):
                raise DiffRateError(
                    "this model gives other numbers when it is built again from what it tells of itself: pass "
                    "model= and model_kwargs= as it was built"
                )
