"""How commands start accelerate: on a device, in a precision, with a tracker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from diffrate.errors import DiffRateError


def start_accelerator(device: torch.device, precision: str, tracker: str | None, output: Path) -> Accelerator:
    if device.index is not None:
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", str(device))
    try:
        return Accelerator(
            cpu=device.type == "cpu", mixed_precision=precision, log_with=tracker, project_dir=str(output)
        )
    except ValueError as error:
        raise DiffRateError(f"cannot start: {error}") from error


def start_tracker(accelerator: Accelerator, tracker: str | None, settings: dict[str, Any]) -> None:
    if tracker:
        accelerator.init_trackers("diffrate", settings)
        if not accelerator.trackers:
            raise DiffRateError(f"the tracker {tracker} is not installed")
