"""Figures 1 and 5: what EViT, ToMe and DiffRate do to the same images at the same MACs, block by block.

Patches of one token share its mean colour, pruned patches are black; EViT's fused token is a token like any other.
DiffRate is the published schedule, so that no search is needed. Writes one picture; seconds on a CPU.

    python reproduce/visualisation.py --budgets 50% --picture tokens.png
"""

from __future__ import annotations

from pathlib import Path

import setting as shared
import torch
from PIL import Image
from setting import Setting
from torch import Tensor

from diffrate.compressed import CompressedModel
from diffrate.methods import build
from diffrate.pictures import stacked, token_picture

METHODS = ("evit", "tome", "published")


def run(setting: Setting, picture: Path, images: int = 4) -> None:
    pixels = setting.val[0][0][:images]
    strips = []
    traces = {}
    for name in METHODS:
        model = build(name, setting.model, setting.budgets[-1])
        assert isinstance(model, CompressedModel)
        with torch.inference_mode():
            traces[name] = model.eval().trace(pixels)
    depth = len(traces["tome"])
    blocks = sorted({max(1, round(depth * share)) for share in (1 / 4, 1 / 2, 3 / 4)} | {depth - 1})
    for i in range(len(pixels)):
        for name, trace in traces.items():
            patches = {block: trace[block - 1].patches[i].cpu() for block in blocks}
            strips.append(token_picture(shown(pixels[i]), patches, model.backbone.grid(pixels), name))
    picture.parent.mkdir(parents=True, exist_ok=True)
    stacked(strips).save(picture)
    print(f"saved {picture}")


def shown(pixels: Tensor) -> Image.Image:
    """A normalised image (C, H, W) with its values spread from dark grey to white: pruned patches alone are black."""
    low, high = pixels.amin(), pixels.amax()
    grey = 64 + 191 * (pixels - low) / (high - low).clamp_min(1e-6)
    array = grey.round().byte().movedim(0, -1).cpu().numpy()
    return Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)


if __name__ == "__main__":
    flags = shared.parser(__doc__)
    flags.add_argument("--picture", type=Path, default=Path("tokens.png"))
    arguments = flags.parse_args()
    run(shared.setting(arguments), arguments.picture)
