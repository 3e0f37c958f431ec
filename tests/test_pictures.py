"""Pictures of tokens, pixel by pixel on an image of four patches."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from diffrate.errors import DiffRateError
from diffrate.pictures import (
    ACROSS,
    BLACK,
    GAP,
    LABEL,
    LINE,
    SIDE,
    animation,
    edges,
    encoded,
    painted,
    quarters,
    stacked,
    strip,
)
from diffrate.token_maps import PRUNED, TokenMap

# 4x4 pixels, patches of 2x2: 0 and 1 above, 2 and 3 below
GREY = np.array([[0, 20, 100, 100], [40, 60, 100, 100], [8, 8, 200, 200], [8, 8, 200, 208]], dtype=np.uint8)
APART = [[0, 1], [2, 3]]
REDUCED = [[0, 0], [PRUNED, 1]]  # two merged, one pruned, one alone
CELL = SIDE // 2


def made(*blocks: list[list[int]], pixels: np.ndarray | None = None) -> TokenMap:
    tokens = [np.array(block) for block in blocks]
    image = np.stack([GREY] * 3, axis=-1) if pixels is None else pixels
    return TokenMap(image, tokens, [np.ones(block.max() + 1) for block in tokens])


def panel(picture: Image.Image, number: int) -> np.ndarray:
    left = GAP + number * (SIDE + GAP)
    return np.asarray(picture)[GAP + LABEL :, left : left + SIDE]


def test_merged_patches_take_the_mean_and_pruned_ones_are_black() -> None:
    colour = np.stack([GREY, GREY // 2, np.full_like(GREY, 9)], axis=-1)
    result = painted(colour, np.array(REDUCED))
    assert np.unique(result[:2].reshape(-1, 3), axis=0).tolist() == [[65, 32, 9]]  # means 65, 32.5, 9
    assert (result[2:, :2] == 0).all()
    assert (result[2:, 2:] == colour[2:, 2:]).all()


def test_a_strip_shows_the_image_then_the_blocks_with_lines_between_tokens() -> None:
    picture = strip(made(APART, REDUCED))
    assert picture.mode == "RGB"
    assert picture.size == (GAP + 3 * (SIDE + GAP), GAP + LABEL + SIDE)
    whole, apart, reduced = (panel(picture, i) for i in range(3))
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
    assert (reduced[CELL + 1 :, :CELL] == BLACK).all()
    assert (reduced[CELL + 1 :, CELL + 1 :] == whole[CELL + 1 :, CELL + 1 :]).all()


def test_pruned_neighbours_have_no_line_between_them() -> None:
    assert (panel(strip(made([[PRUNED] * 2] * 2)), 1) == 0).all()


def test_patches_that_do_not_divide_the_image_evenly() -> None:
    assert edges(10, 3).tolist() == [0, 3, 7, 10]
    pixels = np.random.default_rng(0).integers(0, 256, (10, 7, 3), dtype=np.uint8)
    result = painted(pixels, np.array([[0, 1], [0, 2], [PRUNED, 3]]))  # columns of 4 and 3 pixels
    assert (result[:7, :4] == pixels[:7, :4].reshape(-1, 3).mean(0).round()).all()
    assert (result[7:, :4] == 0).all()
    assert (result[:, 4:] == pixels[:, 4:]).all()
    picture = strip(made([[0, 1], [0, 2], [PRUNED, 3]], pixels=pixels))
    scale = -(-SIDE // 10)
    assert picture.size == (GAP + 2 * (7 * scale + GAP), GAP + LABEL + 10 * scale)
    with pytest.raises(DiffRateError, match="4 pixels do not divide into 5"):
        painted(pixels[:4], np.zeros((5, 2), dtype=int))


def test_labels_stacking_and_rows() -> None:
    few, many = strip(made(REDUCED)), strip(made(APART))
    labels = [np.asarray(each)[: GAP + LABEL, GAP + SIDE + GAP :] for each in (few, many)]
    assert labels[0].min() < 128  # something is written
    assert (labels[0] != labels[1]).any()  # "2 of 4" and "4 of 4"
    both = stacked([few, many])
    assert both.size == (few.width, 2 * few.height)
    assert (np.asarray(both)[few.height :] == np.asarray(many)).all()
    deep = strip(made(*[APART] * ACROSS))  # with the image itself one more than a row holds
    assert deep.size == (GAP + ACROSS * (SIDE + GAP), 2 * few.height)
    chosen = strip(made(APART, REDUCED, APART), [2])
    assert (panel(chosen, 1) == panel(few, 1)).all()
    with pytest.raises(DiffRateError, match="no block 4: the model has blocks 1 to 3"):
        strip(made(APART, REDUCED, APART), [4])


def test_a_title_wider_than_its_panel_is_cut() -> None:
    picture = np.asarray(strip(made(APART), title="W" * 500))
    gap = picture[: GAP + LABEL, GAP + SIDE : GAP + SIDE + GAP]
    assert (gap == 255).all()
    assert strip(made(APART), title="two\nlines\x00").size == strip(made(APART)).size


@pytest.mark.parametrize("form", ["gif", "webp"])
def test_an_animation_has_a_frame_for_the_image_and_for_each_block(form: str) -> None:
    image = made(APART, REDUCED, [[PRUNED, PRUNED], [PRUNED, 0]])
    with Image.open(io.BytesIO(animation(image, form=form))) as moving:
        assert moving.format == form.upper()
        assert moving.n_frames == 4
        assert moving.info["loop"] == 0
        frames = []
        for i in range(4):
            moving.seek(i)
            frames.append(np.asarray(moving.convert("RGB")).astype(int))
    wanted = np.asarray(strip(image, [2]))[:, SIDE + GAP :]
    assert np.abs(frames[2][GAP + LABEL :] - wanted[GAP + LABEL :]).max() <= 8  # a palette may round colours
    assert [(frame[GAP + LABEL :] == 0).all(-1).sum() // CELL**2 for frame in frames[1:]] == [0, 0, 3]


def test_encoded() -> None:
    with Image.open(io.BytesIO(encoded(made(APART, REDUCED), "png", [2]))) as picture:
        assert (np.asarray(picture) == np.asarray(strip(made(APART, REDUCED), [2]))).all()
    assert encoded(made(APART), "gif")[:3] == b"GIF"


def test_blocks_that_tell_the_story() -> None:
    assert quarters(12) == [3, 6, 9, 11]
    assert quarters(4) == [1, 2, 3]
    assert quarters(1) == [1]
