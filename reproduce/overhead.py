"""Overhead: what ranking and matching cost beside the model, by the paper's formulas and as counted here. No images.

The paper, for DeiT-S with 196 tokens: 4.7 k parameters and 0.24 M FLOPs for the search's proxies, 1.36 M FLOPs a block
for sorting and matching 20 tokens. The search by measured slopes (`--recipe fast`) adds no parameters at all.

Cost: twenty seconds on a busy CPU core.

Measured here: results/reproduce_overhead_cpu.json: by torch's counter, ranking and matching are 0.30 % of the MACs of
DeiT-T at 0.8 GMACs, 0.16 % of DeiT-S at 2.9 and 0.08 % of DeiT-B at 11.5. The formulas give 4,704 parameters.

    python reproduce/overhead.py --json results/reproduce_overhead_cpu.json
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import timm
import torch
from setting import without_images
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import diffrate

TITLE = "Overhead"
PAPER = {"proxy_parameters": 4_700, "proxy_flops": 0.24e6, "module_flops": 1.36e6}
FORMULAS = "the paper's formulas"
MODELS = {"deit_tiny_patch16_224": 0.8, "deit_small_patch16_224": 2.9, "deit_base_patch16_224": 11.5}


def formulas(n: int = 196, blocks: int = 12, dim: int = 384, merged: int = 20) -> dict[str, float]:
    """The paper's own: 2NL parameters, (N^2 + 5N)L / 2 FLOPs, N log N + (N - N_m + 1) N_m C FLOPs."""
    return {
        "proxy_parameters": 2 * n * blocks,
        "proxy_flops": (n**2 + 5 * n) * blocks / 2,
        "module_flops": n * math.log2(n) + (n - merged + 1) * merged * dim,
    }


def counted(name: str, gmacs: float) -> dict[str, float]:
    """MACs of one image under a published schedule: the model's own, and everything that the counter saw."""
    model = timm.create_model(name).eval()
    fast = diffrate.compress(model, diffrate.Schedule.published(name, gmacs))
    # Attention as plain products: a CPU's kernel for it is counted by newer versions of torch only.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        # Every token that is left, as MACs are counted; for logits alone the last block runs for the class token only.
        fast.backbone.head(fast.forward_tokens(torch.zeros(1, 3, 224, 224)))
    seen, own = counter.get_total_flops() / 2e9, diffrate.gmacs(fast)
    return {"gmacs": own, "counted_gmacs": seen, "overhead_percent": 100 * (seen / own - 1)}


def rows() -> Iterator[dict[str, Any]]:
    yield {"name": FORMULAS, **formulas()}
    for name, gmacs in MODELS.items():
        yield {"name": name, **counted(name, gmacs)}


if __name__ == "__main__":
    without_images(__doc__, "overhead", TITLE, PAPER, rows())
