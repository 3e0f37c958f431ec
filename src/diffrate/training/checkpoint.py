"""Weights and the state of a training run as safetensors files, each written in one move."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from diffrate.digest import KEY, digest
from diffrate.errors import DiffRateError
from diffrate.models import what_does_not_fit
from diffrate.schedule import write_bytes


@dataclass
class Progress:
    """Where a run stands: steps done, the loss of the present epoch so far, and what earlier epochs gave."""

    step: int = 0
    loss: float = 0.0  # sum over the steps of the present epoch
    epoch_seconds: float = 0.0  # spent on it
    best: float = -1.0  # highest accuracy on the validation images, in percent
    best_epoch: int = 0
    scaler: dict[str, Any] | None = None  # of fp16
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


def save_weights(model: nn.Module, path: Path, dtype: torch.dtype | None = None) -> None:
    """The model's state as safetensors, in one move: a reader finds the old file or the new one, never half."""
    write_tensors(path, whole_state(model, dtype))


def whole_state(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The model's state on the CPU, put together where processes have parts of it: all of them must take part."""
    return {
        name: whole(value).to("cpu", dtype if value.is_floating_point() else None).contiguous()
        for name, value in model.state_dict().items()
    }


def load_weights(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Bring a whole state back, also into a model of which each process has a part."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(like(value, state[name]))


def whole(value: Tensor) -> Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(present: Tensor, value: Tensor) -> Tensor:
    """A whole tensor in the parts that `present` is in."""
    value = value.to(present.device, present.dtype)
    if isinstance(present, DTensor):
        return distribute_tensor(value, present.device_mesh, present.placements)
    return value


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    write_bytes(path, save(dict(tensors), metadata))


def gather_state(
    model: nn.Module, average: nn.Module | None, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that a resumed run needs beside its progress: tensors, and what of the optimiser is none."""
    tensors = {f"model/{name}": value for name, value in whole_state(model).items()}
    if average is not None:
        tensors |= {f"average/{name}": value for name, value in whole_state(average).items()}
    plain: dict[str, Any] = {}
    for place, entries in optimizer.state_dict()["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{place}/{name}"] = whole(value).cpu().contiguous()
            else:
                plain[f"{place}/{name}"] = value
    return tensors, plain


def save_state(path: Path, state: tuple[dict[str, Tensor], dict[str, Any]], progress: Progress) -> None:
    tensors, plain = state
    texts = {"progress": json.dumps(asdict(progress)), "optimizer": json.dumps(plain)}
    write_tensors(path, tensors, {**texts, KEY: _digest(tensors, texts)})


def load_state(
    path: Path, model: nn.Module, average: nn.Module | None, optimizer: torch.optim.Optimizer
) -> Progress:
    """Bring a run back to where `save_state` left it."""
    try:
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        texts = {name: metadata[name] for name in ("progress", "optimizer")}
        if metadata.get(KEY) != _digest(tensors, texts):
            raise ValueError("its content does not have the digest that it was written with")
        progress = Progress(**json.loads(texts["progress"]))
        plain = json.loads(texts["optimizer"])
    except Exception as error:  # a damaged file raises whatever its parser raises
        raise DiffRateError(f"{path} is not a state to resume from: {what_does_not_fit(error)}") from error
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        parts.setdefault(kind, {})[name] = value
    load_weights(model, parts["model"])
    if average is not None:
        load_weights(average, parts["average"])
    _load_optimizer(optimizer, parts.get("optimizer", {}), plain)
    return progress


def _digest(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> str:
    """Of all that a state holds, tensors by their bytes."""
    parts: list[Any] = [part for name in sorted(texts) for part in (name, texts[name])]
    for name in sorted(tensors):
        value = tensors[name]
        # Half precisions have no numpy type; every number is a row of bytes.
        parts += [
            f"{name} {value.dtype} {list(value.shape)}",
            value.reshape(-1).view(torch.uint8).numpy().data,
        ]
    return digest(*parts)


def _load_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
) -> None:
    present = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **plain}.items():
        place, _, name = key.partition("/")
        parameter = parameters[int(place)]
        if isinstance(value, Tensor) and value.shape == parameter.shape and isinstance(parameter, DTensor):
            value = like(parameter, value)
        state.setdefault(int(place), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": present["param_groups"]})
