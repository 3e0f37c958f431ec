"""Pictures of what a schedule does to an image, as in the paper's visualisation figures: strips and animations.

Patches that share a token take the mean colour of all its pixels; a pruned patch is black; a patch that still has a
token of its own is as it was. A line runs between different tokens.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from diffrate.errors import DiffRateError
from diffrate.token_maps import PRUNED, TokenMap

SIDE = 168  # pixels that a panel has at least; images are enlarged by a whole factor
GAP = 8  # pixels around panels
LABEL = 20  # height of the line above a panel
ACROSS = 7  # panels in a row of a strip
LINE = (255, 140, 0)  # between different tokens: a colour that grey images do not have
BLACK = (0, 0, 0)
PAPER, INK = (255, 255, 255), (40, 40, 40)
MILLISECONDS, FIRST_AND_LAST = 500, 1500  # that an animation shows a block
ANIMATIONS = ("gif", "webp")
FORMATS = ("png", *ANIMATIONS)


def strip(
    image: TokenMap, blocks: Sequence[int] | None = None, title: str = "image", across: int = ACROSS
) -> Image.Image:
    """The image, then for each of `blocks` (from 1; without any, all) what is left of it; `across` panels in a row."""
    chosen = range(1, image.depth + 1) if blocks is None else blocks
    for block in chosen:
        if not 1 <= block <= image.depth:
            raise DiffRateError(f"there is no block {block}: the model has blocks 1 to {image.depth}")
    panels = [panel(image, 0), *(panel(image, block) for block in chosen)]
    labels = [title, *(label(image, block) for block in chosen)]
    rows = [
        _row(panels[start : start + across], labels[start : start + across])
        for start in range(0, len(panels), across)
    ]
    return stacked(rows)


def animation(image: TokenMap, title: str = "image", form: str = "gif") -> bytes:
    """The image, then every block, as an animated GIF or WebP that runs on and on."""
    frames = [_row([panel(image, 0)], [title])]
    frames += [_row([panel(image, block)], [label(image, block)]) for block in range(1, image.depth + 1)]
    durations = [FIRST_AND_LAST, *[MILLISECONDS] * (len(frames) - 2), FIRST_AND_LAST]
    file = io.BytesIO()
    options = {"lossless": True} if form == "webp" else {"optimize": False}
    frames[0].save(file, form, save_all=True, append_images=frames[1:], duration=durations, loop=0, **options)
    return file.getvalue()


def encoded(image: TokenMap, form: str, blocks: Sequence[int] | None = None, title: str = "image") -> bytes:
    """A strip as png, or an animation as gif or webp."""
    if form in ANIMATIONS:
        return animation(image, title, form)
    file = io.BytesIO()
    strip(image, blocks, title).save(file, form)
    return file.getvalue()


def quarters(depth: int) -> list[int]:
    """Blocks that tell the story: each quarter of the depth, and the one before the last."""
    return sorted({max(1, round(depth * share)) for share in (1 / 4, 1 / 2, 3 / 4)} | {max(1, depth - 1)})


def stacked(strips: Sequence[Image.Image]) -> Image.Image:
    """Several strips in one picture, one below the other."""
    whole = Image.new("RGB", (max(s.width for s in strips), sum(s.height for s in strips)), PAPER)
    top = 0
    for each in strips:
        whole.paste(each, (0, top))
        top += each.height
    return whole


def panel(image: TokenMap, block: int) -> np.ndarray:
    """(h, w, 3) the image after a block, enlarged; block 0 is the image itself."""
    scale = max(1, -(-SIDE // max(image.pixels.shape[:2])))
    if block == 0:
        return _enlarged(image.pixels, scale)
    tokens = image.tokens[block - 1]
    return _with_lines(_enlarged(painted(image.pixels, tokens), scale), tokens, scale)


def label(image: TokenMap, block: int) -> str:
    return f"block {block}: {image.count(block)} of {image.tokens[0].size}"


def painted(pixels: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The pixels (H, W, 3) with merged patches in their token's mean colour and pruned ones black.

    tokens  (rows, columns) the token of each patch, PRUNED where it has none.
    """
    high, wide = (np.diff(edges(n, parts)) for n, parts in zip(pixels.shape, tokens.shape, strict=False))
    of_pixel = tokens.repeat(high, axis=0).repeat(wide, axis=1)
    result = pixels.copy()
    result[of_pixel == PRUNED] = BLACK
    for token, count in zip(*np.unique(tokens[tokens != PRUNED], return_counts=True), strict=True):
        if count > 1:
            members = of_pixel == token
            result[members] = pixels[members].mean(axis=0).round()
    return result


def edges(pixels: int, parts: int) -> np.ndarray:
    """(parts + 1,) where patches begin and end, in whole pixels also where they do not divide evenly."""
    if not 0 < parts <= pixels:
        raise DiffRateError(f"{pixels} pixels do not divide into {parts} patches")
    return (np.arange(parts + 1) * pixels + parts // 2) // parts


def _enlarged(pixels: np.ndarray, scale: int) -> np.ndarray:
    return pixels.repeat(scale, axis=0).repeat(scale, axis=1)


def _with_lines(panel: np.ndarray, tokens: np.ndarray, scale: int) -> np.ndarray:
    """A line on the first pixels of each patch whose neighbour above or to the left has another token."""
    rows, columns = (
        scale * edges(n // scale, parts) for n, parts in zip(panel.shape, tokens.shape, strict=False)
    )
    for row, column in zip(*np.nonzero(tokens[1:] != tokens[:-1]), strict=True):
        panel[rows[row + 1], columns[column] : columns[column + 1]] = LINE
    for row, column in zip(*np.nonzero(tokens[:, 1:] != tokens[:, :-1]), strict=True):
        panel[rows[row] : rows[row + 1], columns[column + 1]] = LINE
    return panel


def _row(panels: Sequence[np.ndarray], labels: Sequence[str]) -> Image.Image:
    height, width = panels[0].shape[:2]
    row = Image.new("RGB", (GAP + len(panels) * (width + GAP), GAP + LABEL + height), PAPER)
    draw, font = ImageDraw.Draw(row), ImageFont.load_default(size=13)
    for i, (each, text) in enumerate(zip(panels, labels, strict=True)):
        left = GAP + i * (width + GAP)
        draw.text((left, GAP), _fitting(text, width, font), fill=INK, font=font)
        row.paste(Image.fromarray(each), (left, GAP + LABEL))
    return row


def _fitting(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """The text on one line, cut where it is wider than its panel."""
    line = "".join(c if c.isprintable() else " " for c in text)
    while font.getlength(line) > width and len(line) > 1:
        line = line[:-2] + "…"
    return line
