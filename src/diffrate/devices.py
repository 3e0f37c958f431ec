"""Where a model runs: the device behind a name, in words, and a clock that waits for it."""

from __future__ import annotations

import platform
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from diffrate.errors import DiffRateError

AMP_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """The device of that name; without a name the GPU if there is one, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(1, device=resolved)
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        raise DiffRateError(f"device {device} cannot be used on this machine") from error
    return resolved


def autocast(device: torch.device, amp: bool, amp_dtype: str) -> AbstractContextManager[object]:
    """Mixed precision on `device` when `amp` is set, otherwise nothing."""
    if not amp:
        return nullcontext()
    if amp_dtype not in AMP_DTYPES:
        raise DiffRateError(f"amp dtype must be one of {', '.join(AMP_DTYPES)}, not {amp_dtype!r}")
    return torch.autocast(device.type, dtype=AMP_DTYPES[amp_dtype])


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """No mixed precision for a while, where some is on: products that compare nearly equal things need every bit."""
    if (
        device.type == "meta"
    ):  # the one without mixed precision; asking torch itself would break a compiled graph
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def now(device: torch.device) -> float:
    """Seconds on a monotonic clock, once all work queued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def device_name(device: torch.device) -> str:
    """The device in words, as a results file should name it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{_cpu_name()}, {torch.get_num_threads()} threads"
    return str(device)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
