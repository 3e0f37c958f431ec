"""Fixtures that several test files share: tiny models, images, and the command line."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

# Kernels run in Triton's interpreter where there is no GPU. Triton asks for this when it is imported, by timm already.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import timm
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hypothesis import settings
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Subset
from torch.utils.flop_counter import FlopCounterMode

import diffrate
from diffrate import embedded
from diffrate.cli.app import main

# Models here are tiny: on a busy machine, threads that wait for each other cost far more than they save.
torch.set_num_threads(1)
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

REPRODUCE = Path(__file__).resolve().parents[1] / "reproduce"

TINY = {"img_size": 32, "patch_size": 8, "depth": 4, "embed_dim": 32, "num_heads": 2, "num_classes": 3}
TINY_FLAGS = [
    "--model", "vit_tiny_patch16_224", "--num-classes", "3", "--img-size", "32",
    "--model-kwargs", "patch_size=8", "--model-kwargs", "depth=4",
    "--model-kwargs", "embed_dim=32", "--model-kwargs", "num_heads=2",
]  # fmt: skip

SMALL = {"img_size": 32, "patch_size": 8, "depth": 4, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
KINDS = {
    "class token": {},
    "mean-pooled": {"global_pool": "avg"},
    "mean-pooled, no class token": {"global_pool": "avg", "class_token": False},
    "attention-pooled": {"global_pool": "map", "class_token": False},
    "registers": {"reg_tokens": 3},
    "scaled, normed queries": {"init_values": 0.3, "qk_norm": True},
    "non-square": {"img_size": (32, 64)},
}


@pytest.fixture
def tiny_vit() -> nn.Module:
    """4 blocks, 17 tokens (one of them the class token), 3 classes."""
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **TINY).eval()


def random_vit(**changes: object) -> nn.Module:
    """65 tokens, 7 classes, and weights large enough that every part of the model shows in its logits."""
    torch.manual_seed(0)
    arguments = {
        "img_size": 32,
        "patch_size": 4,
        "embed_dim": 32,
        "depth": 4,
        "num_heads": 2,
        "num_classes": 7,
    }
    model = timm.create_model("vit_tiny_patch16_224", **(arguments | changes)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def build(name="vit_tiny_patch16_224", **changes):
    """`SMALL` with changes, one of the `KINDS` for example: 17 tokens as it is, 5 classes."""
    torch.manual_seed(0)
    model = timm.create_model(name, **(SMALL | changes)).eval()
    for parameter in model.parameters():  # zero-initialised heads and biases would hide mistakes
        nn.init.normal_(parameter, std=0.2)
    return model


def layout_of(model):
    return diffrate.compress(model).backbone.layout


def shrinking(model):
    """Prunes and merges in blocks 1 and 2 and, where the head looks at the class token alone, in the last."""
    layout = layout_of(model)
    n, p = layout.tokens, layout.prefix
    last = 5 if layout.compresses_last_block else 7
    return diffrate.Schedule([n, n - 2, p + 9, p + last], [n, n - 5, p + 7, p + last], p)


def batch(model, size=2):
    layout = layout_of(model)
    return torch.randn(size, layout.in_chans, *layout.img_size, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def data():
    """40 images of noise with labels for the 7 classes of `random_vit`."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(3, 32, 32, generator=generator), i % 7) for i in range(40)]


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps the device and the precision that a process began with."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def write_image(path: Path, seed: int, size: tuple[int, int] = (32, 32)) -> Path:
    """A PNG of noise (height, width): lossless, so that a test knows every pixel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(seed, size)).save(path)
    return path


def pixels(seed: int, size: tuple[int, int] = (32, 32)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """`val/` with classes 000, 001 and 002 of four images each, numbered as seeds in that order."""
    root = tmp_path / "images"
    for i in range(12):
        write_image(root / "val" / f"{i // 4:03d}" / f"{i:02d}.png", seed=i)
    return root


@dataclass
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def diffrate_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command line in this process, as `diffrate ARGUMENTS…` would."""

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["diffrate", *map(str, arguments)])
        monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # pytest's, which the program replaces
        capsys.readouterr()
        interrupted = signal.getsignal(signal.SIGINT)
        with pytest.raises(SystemExit) as ended:
            main()
        signal.signal(signal.SIGINT, interrupted)
        captured = capsys.readouterr()
        return Ran(int(ended.value.code or 0), captured.out, captured.err)

    return run


def check_refused(ran: Ran, sentence: str) -> None:
    """Exit code 2, one line on stderr that matches, nothing on stdout, no traceback."""
    assert ran.code == 2, ran
    errors = [line for line in ran.err.splitlines() if not line.startswith("Note: ")]
    assert len(errors) == 1, ran.err
    assert re.match("Error: .*" + sentence, errors[0]), ran.err
    assert not ran.out
    assert "Traceback" not in ran.err


@pytest.fixture
def checkpoint(tiny_vit: nn.Module, tmp_path: Path) -> Path:
    save_file(tiny_vit.state_dict(), tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


@pytest.fixture
def eval_flags(checkpoint: Path, image_folder: Path) -> list[object]:
    data = [
        "--data-dir",
        image_folder,
        "--split",
        "val",
        "--batch-size",
        5,
        "--workers",
        0,
        "--device",
        "cpu",
    ]
    return ["eval", *TINY_FLAGS, "--checkpoint", checkpoint, *data]


@contextmanager
def flop_counter() -> Iterator[FlopCounterMode]:
    """torch's own, with attention as plain products: a CPU's kernel for it is counted by newer versions only."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


def every_token(fast, images):
    """The forward that runs every token of the last block, as the MACs of papers are counted; `forward` runs fewer."""
    return fast.backbone.head(fast.forward_tokens(images))


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a file of reproduce/ by its name, without leaving its neighbours importable."""
    if not REPRODUCE.is_dir() or not (REPRODUCE.parent / "docs").is_dir():
        pytest.skip("reproduce/ and docs/ are part of a checkout, not of the package")
    monkeypatch.syspath_prepend(str(REPRODUCE))
    return importlib.import_module


@pytest.fixture
def small(load, tmp_path: Path) -> object:
    """What a file of reproduce/ works on: 12 blocks and 197 tokens, as published schedules need, but narrow and
    untrained; 12 images.
    """
    torch.manual_seed(0)
    shape = {"img_size": 28, "patch_size": 2, "in_chans": 1, "embed_dim": 8, "num_heads": 1, "depth": 12}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **shape).eval()
    images, labels = embedded.images("test")
    val = [(embedded.normalise(images[i : i + 6, None]), labels[i : i + 6]) for i in (0, 6)]
    data = Subset(embedded.dataset("search"), range(20))
    budgets = [0.6 * diffrate.gmacs(model)]
    return load("setting").Setting(
        "small", model, val, (data, data), Accelerator(cpu=True), budgets, 1, 4, 0, tmp_path / "rows.json"
    )
