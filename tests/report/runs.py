"""Run folders for the report's tests: small, real where it matters, and full of names that try to be markup."""

from __future__ import annotations

import json
from pathlib import Path

import timm
import torch

import diffrate
from conftest import TINY
from diffrate.report.measured import Shown, measure
from diffrate.report.run import read_run

SCRIPT = "</script><script>window.hacked = 1</script>"
IMAGE = '<img src=x onerror="window.hacked = 2">'
QUOTES = "\"'><b onmouseover=window.hacked=3>&amp;\u2028\u2029"
HOSTILE = (SCRIPT, IMAGE, QUOTES)
SCHEDULE = diffrate.Schedule((17, 14, 10, 3), (17, 12, 8, 3), cost={"gmacs": 0.0006}, made={"budget": "60%"})
STEPS = [
    {"budget": "60%", "step": i, "loss": 1 / (i + 1), "kept": [17, 15 - i, 9, 3], "held_out": 0.5 - 0.1 * i}
    for i in range(4)
]


def plain_run(folder: Path, **config: object) -> Path:
    """A finished search, of which nothing was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    SCHEDULE.save(folder / "schedule.json")
    made = {
        "command": f"diffrate search --model {IMAGE}",
        "date": "2026-01-02T03:04:05+00:00",
        "torch": "9.9",
    }
    (folder / "history.json").write_text(
        json.dumps({"steps": STEPS, "seconds": 12.3, "unreadable": [SCRIPT], "made": made})
    )
    (folder / "config.json").write_text(
        json.dumps({"model": SCRIPT, "whole": {"gmacs": 0.001}, "images": 1000, **config})
    )
    return folder


def batches(count: int = 30) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, 32, 32, generator=generator)
    return list(zip(images.split(8), (torch.arange(count) % 3).split(8), strict=True))


def tiny_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **TINY).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():  # so that every class is answered now and then
        model.head.bias -= model(batches()[0][0]).mean(0)
    return model


def measured_run(folder: Path) -> Path:
    """The same with 30 images measured, all names hostile."""
    run = read_run(plain_run(folder))
    shown = Shown((0.5,) * 3, (0.5,) * 3, HOSTILE, lambda i: f"{HOSTILE[i % 3]}-{i}.png")
    measure(
        run, tiny_model(), batches(), shown, ["tome", "resolution"], 8, asked={"data": SCRIPT}, command=QUOTES
    )
    return folder
