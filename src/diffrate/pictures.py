"""Pictures of what a schedule does to an image: which patches were merged with which, and which were pruned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from diffrate.errors import DiffRateError

SIDE = 168  # pixels that a panel has at least; images are enlarged by a whole factor
GAP = 8  # pixels around panels
LABEL = 20  # height of the line above a panel
LINE = (255, 140, 0)  # between different tokens: a colour that grey images do not have
PRUNED = (0, 0, 0)
PAPER, INK = (255, 255, 255), (40, 40, 40)


def token_picture(
    image: Image.Image,
    patches: Mapping[int, Tensor],
    grid: tuple[int, int],
    title: str = "image",
) -> Image.Image:
    """A strip: the image, then for each chosen block what is left of it.

    image    grey or RGB, as the model saw it.
    patches  for each block number, from 1, the map (P,) from patch to token that leaves this block: row `b` of
             `CompressedModel.trace(images)[number - 1].patches`. Negative is pruned.
    grid     (rows, columns) of patches.

    Patches that share a token take the mean colour of all its pixels; a pruned patch is black; a patch that still has
    a token of its own is as it was. A line runs between different tokens.
    """
    pixels = np.asarray(image.convert("RGB"))
    height, width = pixels.shape[:2]
    if height % grid[0] or width % grid[1]:
        raise DiffRateError(
            f"an image of {height}x{width} pixels does not divide into {grid[0]}x{grid[1]} patches"
        )
    scale = max(1, -(-SIDE // max(height, width)))
    panels, labels = [_enlarged(pixels, scale)], [title]
    for block, of_block in patches.items():
        tokens = of_block.detach().cpu().numpy()
        if tokens.shape != (grid[0] * grid[1],):
            raise DiffRateError(f"block {block} maps {tokens.shape} patches, not {grid[0]} x {grid[1]}")
        tokens = tokens.reshape(grid)
        panels.append(_with_lines(_enlarged(painted(pixels, tokens), scale), tokens))
        labels.append(f"block {block}: {len(np.unique(tokens[tokens >= 0]))} of {tokens.size}")
    return _strip(panels, labels)


def stacked(strips: Sequence[Image.Image]) -> Image.Image:
    """Several strips in one picture, one below the other."""
    whole = Image.new("RGB", (max(s.width for s in strips), sum(s.height for s in strips)), PAPER)
    top = 0
    for strip in strips:
        whole.paste(strip, (0, top))
        top += strip.height
    return whole


def painted(pixels: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The pixels (H, W, 3) with merged patches in their token's mean colour and pruned ones black.

    tokens  (rows, columns) the token of each patch, negative where it was pruned.
    """
    rows, columns = tokens.shape
    of_pixel = tokens.repeat(pixels.shape[0] // rows, axis=0).repeat(pixels.shape[1] // columns, axis=1)
    result = pixels.copy()
    result[of_pixel < 0] = PRUNED
    for token, count in zip(*np.unique(tokens[tokens >= 0], return_counts=True), strict=True):
        if count > 1:
            members = of_pixel == token
            result[members] = pixels[members].mean(axis=0).round()
    return result


def _enlarged(pixels: np.ndarray, scale: int) -> np.ndarray:
    return pixels.repeat(scale, axis=0).repeat(scale, axis=1)


def _with_lines(panel: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """A line on the first pixels of each patch whose neighbour above or to the left has another token."""
    tokens = np.where(tokens < 0, -1, tokens)  # all pruned patches are alike
    high, wide = panel.shape[0] // tokens.shape[0], panel.shape[1] // tokens.shape[1]
    for row, column in zip(*np.nonzero(tokens[1:] != tokens[:-1]), strict=True):
        panel[(row + 1) * high, column * wide : (column + 1) * wide] = LINE
    for row, column in zip(*np.nonzero(tokens[:, 1:] != tokens[:, :-1]), strict=True):
        panel[row * high : (row + 1) * high, (column + 1) * wide] = LINE
    return panel


def _strip(panels: Sequence[np.ndarray], labels: Sequence[str]) -> Image.Image:
    height, width = panels[0].shape[:2]
    strip = Image.new("RGB", (GAP + len(panels) * (width + GAP), GAP + LABEL + height), PAPER)
    draw, font = ImageDraw.Draw(strip), ImageFont.load_default(size=13)
    for i, (panel, label) in enumerate(zip(panels, labels, strict=True)):
        left = GAP + i * (width + GAP)
        draw.text((left, GAP), label, fill=INK, font=font)
        strip.paste(Image.fromarray(panel), (left, GAP + LABEL))
    return strip
