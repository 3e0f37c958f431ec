"""What can be compressed: every family that an adapter knows, and what a search could make of one model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from diffrate import published
from diffrate.backbones import FAMILIES, backbone_of
from diffrate.compressed import checked_operator
from diffrate.costs.macs import MacCost
from diffrate.libraries import EXTRAS
from diffrate.operator import Operator
from diffrate.searching.budget import Space


@dataclass(frozen=True)
class Family:
    """One row of the table: a family of models, an example of it, and what its adapter compresses."""

    library: str
    install: str
    family: str
    example: str
    compresses: str


def families() -> list[Family]:
    """Every supported family, by library."""
    return [
        Family(backbone.library, _install(backbone.library), family, example, backbone.compresses)
        for backbone in FAMILIES
        for family, example in backbone.families.items()
    ]


def _install(library: str) -> str:
    extra = EXTRAS.get(library)
    return "diffrate" if extra is None else f"diffrate[{extra}]"


@dataclass(frozen=True)
class Compressible:
    """One model: its sequence, which blocks may drop tokens, by which ranking, and the MACs that leaves.

    gmacs, least_gmacs  whole, and with as few tokens as a search may leave in every block.
    published           budgets in GMACs at which the paper has a schedule for this model or, borrowed from its
                        family `borrowed_from`, for one of its shape.
    """

    model: str
    library: str
    depth: int
    tokens: int
    prefix: int
    img_size: tuple[int, int]
    blocks: tuple[int, int]
    compresses: str
    importance: str
    head: str
    gmacs: float
    least_gmacs: float
    published: list[float]
    borrowed_from: str | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compressible(model: nn.Module, name: str) -> Compressible:
    """What would be compressed of a model, and at what cost; UnsupportedModelError where nothing can be."""
    backbone = backbone_of(model)
    layout = backbone.layout
    cost = MacCost.of_backbone(backbone)
    space = Space.of(backbone, cost)
    family, borrowed = published.family_of(layout, name)
    head = "looks at the class token"
    if layout.restores:
        head = "sees the restored grid"
    elif layout.mean_pooled:
        head = "weighs tokens by size" if layout.plain_mean else "attends to tokens with log(size)"
    return Compressible(
        model=name,
        library=backbone.library,
        depth=layout.depth,
        tokens=layout.tokens,
        prefix=layout.prefix,
        img_size=layout.img_size,
        blocks=(2, len(space.least)),
        compresses=backbone.compresses,
        importance=checked_operator(Operator(), layout).importance,
        head=head,
        gmacs=cost.of_schedule(None),
        least_gmacs=float(space.gmacs(space.least)),
        published=[] if family is None else published.budgets_of(family),
        borrowed_from=family.name if family is not None and borrowed else None,
    )
