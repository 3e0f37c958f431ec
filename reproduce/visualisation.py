"""Figures 1 and 5: what EViT, ToMe and DiffRate do to the same images at the same MACs, block by block.

Patches of one token share its mean colour, pruned patches are black; EViT's fused token is a token like any other.
DiffRate is the published schedule, so that no search is needed. Writes one picture, of the first four of `--images`.

Cost: twelve seconds on a busy CPU core; of all validation images two minutes, for their accuracy is printed first.

Measured here: results/visualisation_embedded.png, the embedded model. There are no numbers in it, nor in the paper's.
On ViT-Ti the second command draws ImageNet images in as many seconds; that picture is not kept, for the images may not
be shipped.

    python reproduce/visualisation.py --budgets 50% --images 4 --picture results/visualisation_embedded.png
    python reproduce/visualisation.py --model vit_tiny_patch16_224 --checkpoint vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet --crop-pct 1.0 --budgets 0.655G --images 4 --picture runs/visualisation_vit_tiny.png
"""

from __future__ import annotations

from pathlib import Path

import setting as shared
from setting import Setting

from diffrate.compressed import CompressedModel
from diffrate.data import preprocessing
from diffrate.methods import build
from diffrate.pictures import quarters, stacked, strip
from diffrate.token_maps import token_maps

METHODS = ("evit", "tome", "published")


def run(setting: Setting, picture: Path, images: int = 4) -> None:
    pixels = setting.val[0][0][:images]
    seen = preprocessing(setting.model)
    maps = {}
    for name in METHODS:
        model = build(name, setting.model, setting.budgets[-1])
        assert isinstance(model, CompressedModel)
        maps[name] = token_maps(model, pixels, seen["mean"], seen["std"])
    strips = [
        strip(of_method[i], quarters(of_method[i].depth), name)
        for i in range(len(pixels))
        for name, of_method in maps.items()
    ]
    picture.parent.mkdir(parents=True, exist_ok=True)
    stacked(strips).save(picture)
    print(f"saved {picture}")


if __name__ == "__main__":
    flags = shared.parser(__doc__)
    flags.add_argument("--picture", type=Path, default=Path("tokens.png"))
    arguments = flags.parse_args()
    run(shared.setting(arguments), arguments.picture)
