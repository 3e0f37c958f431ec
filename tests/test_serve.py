"""The serving example, through FastAPI's test client."""

from __future__ import annotations

import importlib.util
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import diffrate
from conftest import pixels
from diffrate.data import preprocessing

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("python_multipart", reason="the extra `serve` is not installed")

EXAMPLE = Path(__file__).parents[1] / "examples" / "serve.py"
SCHEDULE = diffrate.Schedule((17, 14, 10, 3), (17, 12, 8, 3))


@pytest.fixture(scope="module")
def serve() -> Any:
    spec = importlib.util.spec_from_file_location("serve", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def client(serve: Any, tiny_vit: nn.Module) -> Iterator[Any]:
    from fastapi.testclient import TestClient

    with TestClient(serve.create_app(diffrate.compress(tiny_vit, SCHEDULE))) as made:
        yield made


def png(seed: int, size: tuple[int, int] = (32, 32)) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels(seed, size)).save(buffer, "PNG")
    return buffer.getvalue()


def bomb(side: int) -> bytes:
    """A PNG of a few hundred bytes whose header promises side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000))


def expected(model: nn.Module, seed: int) -> torch.Tensor:
    """Probabilities by hand: a 32-pixel image through a 32-pixel model is only cropped by what crop_pct takes."""
    from timm.data import create_transform

    transform: Any = create_transform(**preprocessing(model), is_training=False)
    with torch.no_grad():
        return diffrate.compress(model, SCHEDULE)(transform(Image.fromarray(pixels(seed)))[None]).softmax(-1)[
            0
        ]


def test_one_image_and_several(client: Any, tiny_vit: nn.Module) -> None:
    answer = client.post("/predict", files={"image": png(0)})
    assert answer.status_code == 200
    wanted = expected(tiny_vit, 0)
    assert answer.json()["classes"] == wanted.argsort(descending=True).tolist()
    assert answer.json()["probabilities"] == pytest.approx(
        wanted.sort(descending=True).values.tolist(), abs=1e-6
    )
    several = client.post("/predict-batch", files=[("images", png(seed)) for seed in (0, 1)])
    assert several.status_code == 200
    for found, seed in zip(several.json(), (0, 1), strict=True):
        wanted = expected(tiny_vit, seed)
        assert found["probabilities"] == pytest.approx(wanted.sort(descending=True).values.tolist(), abs=1e-5)
    assert client.get("/health").json() == {"status": "ok", "kept_tokens": [17, 12, 8, 3]}


def test_limits(client: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def post(content: bytes) -> int:
        return int(client.post("/predict", files={"image": content}).status_code)

    gif = io.BytesIO()
    Image.fromarray(pixels(0)).save(gif, "GIF")
    assert post(gif.getvalue()) == 415
    assert post(b"not an image") == 415
    assert post(b"") in (415, 422)
    assert post(png(0)[:-40]) == 415  # cut short
    assert post(bomb(20_000)) == 413  # Pillow itself would refuse this one
    assert post(bomb(8_000)) == 413  # and not this one, of 192 MB
    assert client.post("/predict-batch", files=[("images", png(0))] * 17).status_code == 413
    assert client.post("/predict", content=iter([b"x"]), headers={"content-type": "x"}).status_code == 411

    for length in ("9" * 12, "9" * 5000):
        declared = {"content-type": "x", "content-length": length}
        assert client.post("/predict", content=b"x", headers=declared).status_code == 413

    monkeypatch.setattr(serve, "MOST_BYTES", 1000)
    monkeypatch.setattr(serve, "SLACK", 1000)
    assert post(png(0)) == 413  # by what it declares
    monkeypatch.setattr(serve, "SLACK", 10_000)
    assert post(png(0)) == 413  # by what arrives
    assert client.get("/health").status_code == 200


def test_the_model_comes_from_a_folder(
    serve: Any, tiny_vit: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diffrate.save(diffrate.compress(tiny_vit, SCHEDULE), tmp_path)
    monkeypatch.setenv("DIFFRATE_MODEL", str(tmp_path))
    assert {route.path for route in serve.app.routes} >= {"/predict", "/predict-batch", "/health"}
