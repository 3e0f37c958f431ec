"""Damaged and odd images, through the readers behind eval, search and visualize.

Each must give finite pixels of the right size, or be refused by its name in a sentence.
"""

from __future__ import annotations

import io
import os
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from attack.outcome import REFUSED, Tally, outcome
from conftest import pixels
from diffrate.data import ImageFiles, build_dataset, plain_transform, preprocessing

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
NAMES = (
    "a\nb",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"'&;$(id)`",
    "\x1b[31m",
    "\u202e",
    "ü" * 100,
)


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png_of(width: int, height: int, depth: int = 8) -> bytes:
    """A PNG whose header promises so many pixels, all of them black."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    packer = zlib.compressobj()
    row = b"\x00" * (1 + min(width, 100_000) * depth // 8)
    rows = (
        b"".join(packer.compress(row) for _ in range(height if width * height < 10**8 else 10))
        + packer.flush()
    )
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def odd_images() -> Iterator[tuple[str, bytes, bool | None]]:
    """Names, files, and whether they must be read (True), refused (False) or either."""
    noise = Image.fromarray(pixels(0, (48, 40)))
    for form in FORMATS:
        yield f"good.{form.lower()}", encoded(noise, form), True
    yield "grey.png", encoded(noise.convert("L"), "PNG"), True
    yield "one_bit.png", encoded(noise.convert("1"), "PNG"), True
    yield "palette.gif", encoded(noise, "GIF"), True
    yield "alpha.png", encoded(noise.convert("RGBA"), "PNG"), True
    yield "cmyk.jpg", encoded(noise.convert("CMYK"), "JPEG"), True
    yield "lab.tiff", encoded(noise.convert("LAB"), "TIFF"), True
    yield "float.tiff", encoded(Image.fromarray(np.random.rand(40, 40).astype(np.float32)), "TIFF"), True
    yield "sixteen.png", encoded(Image.fromarray(np.full((40, 40), 0x8000, np.uint16)), "PNG"), True
    yield "one_pixel.png", encoded(noise.resize((1, 1)), "PNG"), True
    yield "two.png", encoded(noise.resize((2, 3)), "PNG"), True
    frames = [Image.fromarray(pixels(i, (40, 40))) for i in range(4)]
    for form in ("GIF", "WEBP", "PNG", "TIFF"):
        yield (
            f"moving.{form.lower()}",
            encoded(frames[0], form, save_all=True, append_images=frames[1:]),
            True,
        )
    yield "wide.png", png_of(30_000, 300), True
    yield "very_wide.png", png_of(30_000, 1), False
    yield "very_high.png", png_of(1, 30_000), False
    yield "bomb.png", png_of(60_000, 60_000), False
    yield "claims.png", png_of(2**31 - 1, 2**31 - 1)[:200], False
    yield "nothing.png", b"", False
    yield "text.jpg", b"hello" * 100, False
    yield "html.png", b"<!doctype html><img src=x>", False
    yield "svg.png", b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>', False
    yield "zip.png", b"PK\x03\x04" + b"\x00" * 100, False
    yield "pickle.png", b"\x80\x04cos\nsystem\n(S'true'\ntR.", False
    yield "script.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", None


def damaged_images(chance: random.Random) -> Iterator[tuple[str, bytes, bool | None]]:
    """Good images with bytes cut off, flipped, put in or taken from another file, under any name, without end."""
    noise = Image.fromarray(pixels(1, (64, 64)))
    files = [encoded(noise, form) for form in (*FORMATS, "GIF")]
    number = 0
    while True:
        data = bytearray(chance.choice(files))
        match chance.randrange(4):
            case 0:
                del data[chance.randrange(len(data)) :]
            case 1:
                for _ in range(chance.choice((1, 5, 100))):
                    data[chance.randrange(len(data))] = chance.randrange(256)
            case 2:
                start = chance.randrange(min(64, len(data)))
                data[start : start + 4] = chance.randbytes(4)
            case 3:
                other = chance.choice(files)
                data[chance.randrange(len(data)) :] = other[chance.randrange(len(other)) :]
        number += 1
        ending = chance.choice(("png", "jpg", "webp", "bmp", "tif"))
        yield f"{number}{chance.choice(NAMES) if number % 7 == 0 else ''}.{ending}", bytes(data), None


def attack(folder: Path, model: nn.Module, count: int, seed: int = 0) -> Tally:
    """The odd images and as many damaged ones as make `count`, through both readers."""
    chance, tally = random.Random(seed), Tally()
    config = preprocessing(model)
    size = tuple(config["input_size"])
    inside = folder / "images" / "class"
    inside.mkdir(parents=True)
    damaged, odd = damaged_images(chance), list(odd_images())
    files = [*odd, *(next(damaged) for _ in range(count - len(odd)))]
    expected: dict[str, bool | None] = {}
    for name, content, good in files:
        (inside / name.replace("/", "_")).write_bytes(content)
        expected[name.replace("/", "_")] = good
    os.mkfifo(inside / "pipe.png")
    expected["pipe.png"] = False
    (inside / "folder.png").mkdir()
    os.symlink("loop.png", inside / "loop.png")
    expected["loop.png"] = False

    def check(name: str, ended: str, said: str, made: list[Any]) -> None:
        if ended == REFUSED and ("\n" in said or "cannot read the image" not in said):
            ended = "no sentence"
        if made and not (made[0].shape == size and torch.isfinite(made[0]).all()):
            ended = "wrong pixels"
        if expected[name] is (ended == REFUSED):
            ended = "not as expected"
        tally.add(ended, f"{name!r}: {said}")

    found = build_dataset(folder / "images", labels=False)
    found.transform = plain_transform(config)
    for i in range(len(found)):  # as eval and search read
        made: list[Any] = []
        ended, said = outcome(lambda i=i, made=made: made.append(found[i][0]), seconds=30)
        check(Path(found.file_name(i)).name, ended, said, made)
    for name in expected:  # as visualize reads
        made = []
        ended, said = outcome(
            lambda f=inside / name, made=made: made.append(ImageFiles([f], config)[0]), seconds=30
        )
        check(name, ended, said, made)
    return tally
