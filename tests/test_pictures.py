"""Pictures of tokens, pixel by pixel on an image of four patches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import diffrate
from diffrate.errors import DiffRateError
from diffrate.pictures import GAP, LABEL, LINE, PRUNED, SIDE, painted, stacked, token_picture

# 4x4 pixels, patches of 2x2: 0 and 1 above, 2 and 3 below
GREY = np.array([[0, 20, 100, 100], [40, 60, 100, 100], [8, 8, 200, 200], [8, 8, 200, 208]], dtype=np.uint8)
TOKENS = [5, 5, ~5, 7]  # 0 and 1 merged, 2 pruned, 3 alone
CELL = SIDE // 2


def panel(strip: Image.Image, number: int) -> np.ndarray:
    left = GAP + number * (SIDE + GAP)
    return np.asarray(strip)[GAP + LABEL :, left : left + SIDE]


def test_merged_patches_take_the_mean_and_pruned_ones_are_black() -> None:
    colour = np.stack([GREY, GREY // 2, np.full_like(GREY, 9)], axis=-1)
    result = painted(colour, np.array(TOKENS).reshape(2, 2))
    assert np.unique(result[:2].reshape(-1, 3), axis=0).tolist() == [[65, 32, 9]]  # means 65, 32.5, 9
    assert (result[2:, :2] == 0).all()
    assert (result[2:, 2:] == colour[2:, 2:]).all()


def test_a_strip_shows_the_image_then_the_blocks_with_lines_between_tokens() -> None:
    strip = token_picture(
        Image.fromarray(GREY), {3: torch.tensor([1, 2, 3, 4]), 4: torch.tensor(TOKENS)}, (2, 2)
    )
    assert strip.mode == "RGB"
    assert strip.size == (GAP + 3 * (SIDE + GAP), GAP + LABEL + SIDE)
    whole, apart, reduced = (panel(strip, i) for i in range(3))
    pixel = SIDE // 4
    assert (whole == GREY.repeat(pixel, 0).repeat(pixel, 1)[..., None]).all()

    lines = (apart == LINE).all(-1)
    assert lines[CELL].all()
    assert lines[:, CELL].all()
    assert lines.sum() == 2 * SIDE - 1
    assert (apart[~lines] == whole[~lines]).all()

    lines = (reduced == LINE).all(-1)
    assert lines[CELL].all()
    assert lines[CELL:, CELL].all()
    assert lines.sum() == SIDE + CELL - 1  # none between the two patches of one token
    assert (reduced[:CELL] == 65).all()
    assert (reduced[CELL + 1 :, :CELL] == PRUNED).all()
    assert (reduced[CELL + 1 :, CELL + 1 :] == whole[CELL + 1 :, CELL + 1 :]).all()


def test_pruned_neighbours_have_no_line_between_them() -> None:
    strip = token_picture(Image.fromarray(GREY), {1: torch.tensor([~1, ~2, ~2, ~1])}, (2, 2))
    assert (panel(strip, 1) == 0).all()


def test_labels_and_stacking() -> None:
    image = Image.fromarray(GREY)
    few, many = (token_picture(image, {4: torch.tensor(t)}, (2, 2)) for t in (TOKENS, [1, 2, 3, 4]))
    labels = [np.asarray(strip)[: GAP + LABEL, GAP + SIDE + GAP :] for strip in (few, many)]
    assert labels[0].min() < 128  # something is written
    assert (labels[0] != labels[1]).any()  # "2 of 4" and "4 of 4"
    both = stacked([few, many])
    assert both.size == (few.width, 2 * few.height)
    assert (np.asarray(both)[few.height :] == np.asarray(many)).all()


def test_a_models_trace_fits(tiny_vit: nn.Module) -> None:
    schedule = diffrate.Schedule((17, 14, 10, 3), (17, 12, 8, 3))
    trace = diffrate.compress(tiny_vit, schedule).trace(torch.randn(2, 3, 32, 32))
    patches = {block: trace[block - 1].patches[1] for block in (2, 3)}
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    strip = np.asarray(token_picture(image, patches, (4, 4)))
    scale = -(-SIDE // 32)
    pruned = sum(int((p < 0).sum()) for p in patches.values())
    assert pruned > 0
    # black but for the lines, which take at most two sides of a patch
    black = (strip[GAP + LABEL :] == 0).all(-1).sum()
    assert pruned * (8 * scale - 1) ** 2 <= black <= pruned * (8 * scale) ** 2


def test_what_does_not_fit_is_refused() -> None:
    image = Image.fromarray(GREY)
    with pytest.raises(DiffRateError, match="4x4 pixels does not divide into 3x3"):
        token_picture(image, {}, (3, 3))
    with pytest.raises(DiffRateError, match="block 2"):
        token_picture(image, {2: torch.tensor([1, 2])}, (2, 2))
