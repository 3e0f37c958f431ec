"""How much each block's count matters, measured: real forward passes with a few tokens more or fewer in one block.

The straight-through gradient of the paper is biased where it counts (a revived token is taken to live to the end; a
block above the running minimum gets none). A schedule has only a dozen numbers, so their slopes can be measured
instead, at the price of a few forward passes: every variant shares the prefix of the walk before its block, and,
because only one count differs, the sequence lengths from the block after it on, so variants join one growing batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffrate.backbones import Backbone
from diffrate.blocks import attend_and_rank, reduce_and_finish
from diffrate.operator import Operator
from diffrate.reduction import restore
from diffrate.tokens import Tokens, rows, stacked

# Every step has other sequence lengths, and cuDNN would plan anew for each: hundreds of milliseconds.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class Branch:
    """Variants of a schedule that hold equally many tokens now, stacked along the batch.

    variants  which one each chunk of the batch is: 0 the schedule itself, i the change in block i.
    maps      (B, P, C) the restored features of each patch after every block that was asked for.
    """

    tokens: Tokens
    variants: list[int]
    maps: list[Tensor] = field(default_factory=list)

    def map_if(self, wanted: bool) -> None:
        if wanted:
            assert self.tokens.patches is not None
            self.maps.append(restore(self.tokens.x, self.tokens.patches))


def variant_logits(
    backbone: Backbone, images: Tensor, kept: Sequence[int], changed: Sequence[int], operator: Operator
) -> Tensor:
    """(1 + L', B, classes) logits of the schedule `kept` and of each variant that keeps `changed[i]` in block i.

    Where changed[i] == kept[i] there is nothing to run and the logits are those of the schedule itself. Blocks of the
    model past the L' given are left alone.
    """
    with sdpa_kernel(KERNELS):
        outcomes: dict[int, Tensor] = {}
        for branch in branches(backbone, backbone.start(images), kept, changed, operator):
            logits = backbone.head(branch.tokens.with_features(backbone.norm(branch.tokens.x)))
            logits = logits[0] if isinstance(logits, tuple) else logits
            outcomes.update(zip(branch.variants, logits.split(images.shape[0]), strict=True))
    return every_variant(outcomes, len(kept))


def every_variant(outcomes: Mapping[int, Tensor], blocks: int) -> Tensor:
    """(1 + L', B, …) outcomes in order; a variant that was not run has the schedule's own."""
    return torch.stack([outcomes.get(variant, outcomes[0]) for variant in range(blocks + 1)])


def branches(
    backbone: Backbone,
    first: Tokens,
    kept: Sequence[int],
    changed: Sequence[int],
    operator: Operator,
    mapped: Collection[int] = (),
) -> list[Branch]:
    """All variants after the last block, from the tokens `first`; with the maps after the blocks `mapped`."""
    batch = first.x.shape[0]
    left_alone = [backbone.layout.tokens] * (backbone.layout.depth - len(kept))
    kept, changed = [*kept, *left_alone], [*changed, *left_alone]
    main = Branch(first, [0])
    apart: list[Branch] = []  # variants whose sequence is still longer or shorter than the schedule's
    for i in range(len(kept)):
        attended, ranked = attend_and_rank(backbone, i, main.tokens, operator)
        fork = None
        if changed[i] != kept[i]:
            own = slice(batch)
            its_rank = ranked[own] if isinstance(ranked, Tensor) else ranked.rows(own)
            fork = Branch(
                reduce_and_finish(
                    backbone, i, rows(attended, own), its_rank, changed[i], changed[i], operator
                ),
                [i + 1],
                [grid[own] for grid in main.maps],
            )
            fork.map_if(i in mapped)
        main.tokens = reduce_and_finish(backbone, i, attended, ranked, kept[i], kept[i], operator)
        main.map_if(i in mapped)
        waiting = [] if fork is None else [fork]
        for branch in apart:
            attended, ranked = attend_and_rank(backbone, i, branch.tokens, operator)
            branch.tokens = reduce_and_finish(backbone, i, attended, ranked, kept[i], kept[i], operator)
            branch.map_if(i in mapped)
            if branch.tokens.count == main.tokens.count:
                main = _joined(main, branch)
            else:
                waiting.append(branch)
        apart = waiting
    return [main, *apart]


def _joined(a: Branch, b: Branch) -> Branch:
    maps = [torch.cat(pair) for pair in zip(a.maps, b.maps, strict=True)]
    return Branch(stacked(a.tokens, b.tokens), a.variants + b.variants, maps)
