"""Many schedules on the same images: what they have in common runs once.

Schedules that agree up to a block also agree in what that block's attention sees and how it ranks tokens. So the walk
is a tree that branches where counts differ: the first block is common to all, the second one's attention too, and
schedules near each other share the long sequences of the early blocks. Branches that hold equally many tokens are
stacked along the batch, wherever they come from, and run as one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffrate import kernels
from diffrate.backbones import Backbone
from diffrate.blocks import attend_and_rank, reduce_and_finish, run_block, run_block_for_prefix
from diffrate.compressed import checked, checked_operator
from diffrate.operator import Operator
from diffrate.outputs import main_output
from diffrate.reduction import restore
from diffrate.schedule import Schedule, ScheduleError
from diffrate.tokens import Tokens, rows, stacked

# Searches see other sequence lengths all the time, and cuDNN would plan anew for each: hundreds of milliseconds.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Counts = tuple[int, int]  # what a block keeps after pruning, and after merging


@dataclass
class Branch:
    """Schedules that hold equally many tokens now, stacked along the batch.

    members  of each chunk of the batch, the schedules that are still one.
    maps     (chunks B, P, C) the restored features of each patch after every block that was asked for.
    """

    tokens: Tokens
    members: list[list[int]]
    maps: list[Tensor] = field(default_factory=list)

    def each(self) -> Iterator[tuple[list[int], slice]]:
        """The schedules of each chunk, and its rows."""
        batch = self.tokens.x.shape[0] // len(self.members)
        for i, members in enumerate(self.members):
            yield members, slice(i * batch, (i + 1) * batch)


def in_order(schedules: Sequence[Schedule]) -> list[int]:
    """Indices of schedules, those that share blocks side by side: what is run in groups should be grouped so."""
    counts = list(map(_counts, schedules))
    return sorted(range(len(counts)), key=counts.__getitem__)


def logits_of_many(backbone: Backbone, images: Tensor, schedules: Sequence[Schedule]) -> Tensor:
    """(S, B, classes) logits under each schedule, all of one operator: those of a model compressed by it."""
    with kernels.embedding(images):
        first = backbone.start(images)
    found: dict[int, Tensor] = {}
    for branch in branches(backbone, first, schedules, for_head=True):
        logits = main_output(backbone.head(branch.tokens.with_features(backbone.norm(branch.tokens.x))))
        for members, chunk in branch.each():
            found.update(dict.fromkeys(members, logits[chunk]))
    return torch.stack([found[i] for i in range(len(schedules))])


def branches(
    backbone: Backbone,
    first: Tokens,
    schedules: Sequence[Schedule],
    mapped: Collection[int] = (),
    for_head: bool = False,
) -> list[Branch]:
    """All schedules after the last block, from the tokens `first`; with the maps after the blocks `mapped`.

    for_head  of the last block only what the head looks at.
    """
    layout = backbone.layout
    operators = {checked_operator(each.operator, layout) for each in schedules}
    if len(operators) != 1:
        raise ScheduleError(f"schedules that share a walk must have one operator, not {len(operators)}")
    operator = operators.pop()
    if first.count != layout.tokens and not layout.dynamic:
        raise ScheduleError(
            f"the schedules are for {layout.tokens} tokens and this input gives {first.count}"
        )
    counts = [_counts(checked(each, layout).resized(first.count)) for each in schedules]
    now = [Branch(first, [list(range(len(schedules)))])]
    for block in range(layout.depth):
        last = for_head and block == layout.depth - 1 and layout.compresses_last_block
        its_counts = [each[block] for each in counts]
        after: dict[int, list[Branch]] = {}
        with sdpa_kernel(KERNELS):
            while now:  # what has gone through is not kept
                for part in _block(backbone, block, now.pop(), its_counts, operator, last):
                    if block in mapped:
                        assert part.tokens.patches is not None
                        part.maps.append(restore(part.tokens.x, part.tokens.patches))
                    after.setdefault(part.tokens.count, []).append(part)
        now = [_joined(after.pop(length)) for length in list(after)]
    return now


def _block(
    backbone: Backbone, block: int, branch: Branch, counts: Sequence[Counts], operator: Operator, last: bool
) -> Iterator[Branch]:
    """What a block makes of a branch: one for each pair of counts among its schedules."""
    held = branch.tokens.count
    kept: dict[Counts | None, list[tuple[list[int], slice]]] = {}
    for members, chunk in branch.each():
        ways: dict[Counts | None, list[int]] = {}
        for each in members:
            # None: the head looks at the prefix alone, however few others are kept.
            ways.setdefault(None if last and counts[each][1] < held else counts[each], []).append(each)
        for way, those in ways.items():
            kept.setdefault(way, []).append((those, chunk))
    removes = any(way is not None and way[1] < held for way in kept)
    if removes:
        attended, ranked = attend_and_rank(backbone, block, branch.tokens, operator)
    for way, parts in kept.items():
        whole = len(parts) == len(branch.members)
        chosen = slice(None) if whole else _rows([chunk for _, chunk in parts], branch.tokens.x.device)
        if way is None:
            left = run_block_for_prefix(backbone, block, rows(branch.tokens, chosen), operator)
        elif removes:
            its_rank = ranked[chosen] if isinstance(ranked, Tensor) else ranked.rows(chosen)
            left = reduce_and_finish(backbone, block, rows(attended, chosen), its_rank, *way, operator)
        else:
            left = run_block(backbone, block, rows(branch.tokens, chosen), *way, operator)
        yield Branch(left, [those for those, _ in parts], [grid[chosen] for grid in branch.maps])


def _rows(chunks: Sequence[slice], device: torch.device) -> slice | Tensor:
    if len(chunks) == 1:
        return chunks[0]
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])


def _joined(parts: Sequence[Branch]) -> Branch:
    maps = [torch.cat(grids) for grids in zip(*(part.maps for part in parts), strict=True)]
    members = [each for part in parts for each in part.members]
    return Branch(stacked([part.tokens for part in parts]), members, maps)


def _counts(schedule: Schedule) -> list[Counts]:
    effective = schedule.effective
    return list(zip(effective.prune, effective.merge, strict=True))
