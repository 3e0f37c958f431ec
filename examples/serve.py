"""A small server for a model saved by diffrate.save: one image, or several at once.

    DIFFRATE_MODEL=folder uvicorn examples.serve:app

Uploads are strangers': a request is refused by its declared length, the format and the number of pixels are read from
an image's header before anything is decoded, and only PNG, JPEG and WebP are tried at all. One worker is one
model; put a proxy with timeouts, TLS and rate limits in front.
"""

from __future__ import annotations

import io
import os
import threading
from typing import Annotated, Any

import torch
from fastapi import FastAPI, File, HTTPException, Request, UploadFile
from fastapi.responses import JSONResponse
from PIL import Image
from timm.data import create_transform

import diffrate
from diffrate.data import preprocessing
from diffrate.outputs import main_output

FORMATS = ("PNG", "JPEG", "WEBP")
MOST_BYTES = 10 * 2**20  # of one image
MOST_PIXELS = 40 * 10**6  # once decoded
MOST_IMAGES = 16  # in one request
SLACK = 64 * 2**10  # of a request, for the borders and headers of its parts
TOP = 5


def create_app(model: diffrate.CompressedModel) -> FastAPI:
    """The server of one model."""
    config = preprocessing(model.original)
    transform: Any = create_transform(**config, is_training=False)
    mode = "L" if config["input_size"][0] == 1 else "RGB"
    one_at_a_time = (
        threading.Lock()
    )  # requests come on several threads; two forwards at once only slow each other
    app = FastAPI(title="diffrate")

    @app.middleware("http")
    async def limit_the_body(request: Request, proceed: Any) -> Any:
        """Refuse by the declared length, and without one: a body of unknown length could be endless."""
        if request.method == "POST":
            declared = request.headers.get("content-length", "")
            if not declared.isdecimal():
                return JSONResponse({"detail": "say the length of the request"}, 411)
            images = 1 if request.url.path == "/predict" else MOST_IMAGES
            if len(declared) > 12 or int(declared) > images * MOST_BYTES + SLACK:
                return JSONResponse({"detail": "the request is too large"}, 413)
        return await proceed(request)

    def classify(uploads: list[UploadFile]) -> list[dict[str, Any]]:
        batch = torch.stack([transform(read_image(upload, mode)) for upload in uploads])
        with one_at_a_time, torch.inference_mode():
            chances = main_output(model(batch)).softmax(dim=-1)
        best = chances.topk(min(TOP, chances.shape[-1]))
        return [
            {"classes": classes, "probabilities": values}
            for classes, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "kept_tokens": model.kept}

    @app.post("/predict")  # a plain function, so that the server runs it on a thread and goes on answering
    def predict(image: Annotated[UploadFile, File()]) -> dict[str, Any]:
        return classify([image])[0]

    @app.post("/predict-batch")
    def predict_batch(images: Annotated[list[UploadFile], File()]) -> list[dict[str, Any]]:
        if len(images) > MOST_IMAGES:
            raise HTTPException(413, f"at most {MOST_IMAGES} images at once")
        return classify(images)

    return app


def read_image(upload: UploadFile, mode: str) -> Image.Image:
    """The image of an upload, or the HTTP error that says why not."""
    content = upload.file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise HTTPException(413, f"an image may have {MOST_BYTES} bytes")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as opened:  # reads the header alone
            if opened.width * opened.height > MOST_PIXELS:
                raise HTTPException(413, f"an image may have {MOST_PIXELS} pixels")
            return opened.convert(mode)
    except HTTPException:
        raise
    except Image.DecompressionBombError:
        raise HTTPException(413, f"an image may have {MOST_PIXELS} pixels") from None
    except Exception:  # a broken file raises whatever its decoder raises
        raise HTTPException(415, f"this is no image of {', '.join(FORMATS)} that can be read") from None


def __getattr__(name: str) -> Any:
    """`app`, made when a server asks for it: importing this file loads no model."""
    if name == "app":
        return create_app(diffrate.load(os.environ["DIFFRATE_MODEL"]))
    raise AttributeError(name)
