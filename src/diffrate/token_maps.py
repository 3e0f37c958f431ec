"""What became of an image's patches, block by block: the data behind every picture of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diffrate.compressed import CompressedModel
from diffrate.modes import evaluating
from diffrate.tokens import Tokens

PRUNED = -1
FADED = (
    64  # grey of a black pixel in a picture of a grey image, so that pruned patches are the only black ones
)


@dataclass(frozen=True)
class TokenMap:
    """One image as the model saw it, and the token of each patch as it leaves each block.

    pixels  (H, W, 3) bytes.
    tokens  for each block (rows, columns): which token a patch belongs to, PRUNED where it has none. Tokens are
            numbered from 0 in the order of their first patches.
    mass    for each block, by that number, the size a token has in the model: 1 and, for what joined it, size times
            similarity. How many patches it has is counted in `tokens`.
    """

    pixels: np.ndarray
    tokens: list[np.ndarray]
    mass: list[np.ndarray]

    @property
    def grid(self) -> tuple[int, int]:
        rows, columns = self.tokens[0].shape
        return rows, columns

    @property
    def depth(self) -> int:
        return len(self.tokens)

    def count(self, block: int) -> int:
        """Tokens with patches that leave a block, numbered from 1; prefix tokens are not among them."""
        return len(self.mass[block - 1])


def token_maps(
    model: CompressedModel, inputs: Tensor, mean: Sequence[float], std: Sequence[float]
) -> list[TokenMap]:
    """The maps of a batch of images (B, C, H, W), which were normalised by `mean` and `std`."""
    with evaluating(model), torch.inference_mode():
        trace = model.trace(inputs.to(next(model.parameters()).device))
    grid = model.backbone.grid(inputs)
    steps = [_of_block(tokens, grid) for tokens in trace]
    return [
        TokenMap(pixels, [tokens[b] for tokens, _ in steps], [mass[b] for _, mass in steps])
        for b, pixels in enumerate(as_seen(inputs, mean, std))
    ]


def as_seen(inputs: Tensor, mean: Sequence[float], std: Sequence[float]) -> list[np.ndarray]:
    """Normalised images (B, C, H, W) as bytes (H, W, 3) each; grey ones run from dark grey to white."""
    shape = (1, -1, 1, 1)
    colours = inputs.detach().float().cpu() * torch.tensor(std).view(shape) + torch.tensor(mean).view(shape)
    values = 255 * colours.clamp(0, 1)
    if values.shape[1] == 1:
        values = FADED + values * (255 - FADED) / 255
    pixels = values.round().byte().expand(-1, 3, -1, -1)
    return list(pixels.movedim(1, -1).contiguous().numpy())


def _of_block(tokens: Tokens, grid: tuple[int, int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    assert tokens.patches is not None  # a trace always has them
    numbered, masses = [], []
    for patches, sizes in zip(
        tokens.patches.cpu().numpy(), tokens.sizes().float().cpu().numpy(), strict=True
    ):
        found, first, inverse = np.unique(patches, return_index=True, return_inverse=True)
        left = found >= 0
        order = first[left].argsort()  # tokens in the order of their first patches
        number = np.full(len(found), PRUNED)
        number[np.flatnonzero(left)[order]] = np.arange(len(order))
        numbered.append(number[inverse].reshape(grid))
        masses.append(sizes[found[left][order]])
    return numbered, masses
