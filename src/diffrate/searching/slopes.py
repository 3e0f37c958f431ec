"""How much each block's count matters, measured: real forward passes with a few tokens more or fewer in one block.

The straight-through gradient of the paper is biased where it counts (a revived token is taken to live to the end; a
block above the running minimum gets none). A schedule has only a dozen numbers, so their slopes can be measured
instead, at the price of a few forward passes: every variant shares the prefix of the walk before its block, and,
because only one count differs, the sequence lengths from the block after it on, so variants join one growing batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffrate.backbones import Backbone
from diffrate.compressed import attend_and_rank, reduce_and_finish
from diffrate.operator import Operator
from diffrate.tokens import Tokens, rows, stacked

# Every step has other sequence lengths, and cuDNN would plan anew for each: hundreds of milliseconds.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class Branch:
    """Variants of a schedule that hold equally many tokens now, stacked along the batch."""

    tokens: Tokens
    variants: list[
        int
    ]  # which variant each chunk of the batch is: 0 the schedule itself, i the change in block i


def variant_logits(
    backbone: Backbone, images: Tensor, kept: Sequence[int], changed: Sequence[int], operator: Operator
) -> Tensor:
    """(1 + L', B, classes) logits of the schedule `kept` and of each variant that keeps `changed[i]` in block i.

    Where changed[i] == kept[i] there is nothing to run and the logits are those of the schedule itself. Blocks of the
    model past the L' given are left alone.
    """
    with sdpa_kernel(KERNELS):
        return _variant_logits(backbone, images, kept, changed, operator)


def _variant_logits(
    backbone: Backbone, images: Tensor, kept: Sequence[int], changed: Sequence[int], operator: Operator
) -> Tensor:
    batch = images.shape[0]
    left_alone = [backbone.layout.tokens] * (backbone.layout.depth - len(kept))
    kept, changed, variants = [*kept, *left_alone], [*changed, *left_alone], len(kept) + 1
    main = Branch(backbone.start(images), [0])
    apart: list[Branch] = []  # variants whose sequence is still longer or shorter than the schedule's
    for i in range(len(kept)):
        attended, ranked = attend_and_rank(backbone, i, main.tokens, operator)
        fork = None
        if changed[i] != kept[i]:
            first = slice(batch)
            own = ranked[first] if isinstance(ranked, Tensor) else ranked.rows(first)
            fork = Branch(
                reduce_and_finish(backbone, i, rows(attended, first), own, changed[i], changed[i], operator),
                [i + 1],
            )
        main.tokens = reduce_and_finish(backbone, i, attended, ranked, kept[i], kept[i], operator)
        waiting = [] if fork is None else [fork]
        for branch in apart:
            attended, ranked = attend_and_rank(backbone, i, branch.tokens, operator)
            branch.tokens = reduce_and_finish(backbone, i, attended, ranked, kept[i], kept[i], operator)
            if branch.tokens.count == main.tokens.count:
                main = _joined(main, branch)
            else:
                waiting.append(branch)
        apart = waiting
    outcomes: dict[int, Tensor] = {}
    for branch in [main, *apart]:
        logits = backbone.head(branch.tokens.with_features(backbone.norm(branch.tokens.x)))
        logits = logits[0] if isinstance(logits, tuple) else logits
        outcomes.update(zip(branch.variants, logits.split(batch), strict=True))
    return torch.stack([outcomes.get(variant, outcomes[0]) for variant in range(variants)])


def _joined(a: Branch, b: Branch) -> Branch:
    return Branch(stacked(a.tokens, b.tokens), a.variants + b.variants)
