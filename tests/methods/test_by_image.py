"""Images that methods measure their cost on: from the first to the last, because folders are read class by class."""

from __future__ import annotations

import pytest
import torch

from diffrate.errors import DiffRateError
from diffrate.methods.by_image import Spread, spread_images


@pytest.mark.parametrize("batch", [1, 7, 64, 1000])
@pytest.mark.parametrize(
    ("total", "step"), [(5, 1), (15, 1), (16, 2), (31, 4), (32, 4), (100, 8), (1000, 128)]
)
def test_every_kth_image_whatever_the_batches(total: int, step: int, batch: int) -> None:
    images = torch.arange(total).float().view(total, 1, 1, 1)
    loader = [(part, torch.zeros(len(part))) for part in images.split(batch)]
    found = spread_images(loader, least=8)
    assert found.flatten().tolist() == list(range(0, total, step))
    assert len(found) < 16
    assert len(found) >= min(8, total)


def test_a_few_of_those_reach_from_the_first_to_the_last() -> None:
    spread = Spread(8)
    spread.add(torch.arange(100).float())
    assert spread.images().tolist() == list(range(0, 100, 8))
    assert spread.images(5).tolist() == [0, 24, 48, 72, 96]
    assert spread.images(50).tolist() == spread.images().tolist()


def test_no_images_are_refused() -> None:
    with pytest.raises(DiffRateError, match="no images"):
        spread_images([])
