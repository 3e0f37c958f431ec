"""How a block removes the tokens that its schedule tells it to remove (paper 4.1 and its ablations)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from diffrate.errors import DiffRateError, shown

IMPORTANCES = ("auto", "class-attention", "image-attention", "class-attention-value", "random")
SHARED = ("auto", "class-attention")  # of which image tokens may have a share
OPERATIONS = ("prune-merge", "merge-prune", "prune", "merge")
MEANS = ("plain", "size", "attention")
CHOICES = ("rank", "cost")
EXTRAS = ("pruned_mass", "size_aware", "keep_norm")  # options that masks do not know
_ALLOWED = {"importance": IMPORTANCES, "operation": OPERATIONS, "mean": MEANS, "choice": CHOICES}


@dataclass(frozen=True)
class Operator:
    """The choices inside one reduction step; the defaults are the paper's.

    importance    what ranks the image tokens. "class-attention": the class token's attention row, mean over
                  heads; "image-attention": the mean attention a token receives; "class-attention-value": the
                  former times the norm of the token's value; "random": a fixed draw from `seed`;
                  "auto": class attention where the model has a class token, image attention elsewhere.
    operation     "prune-merge" is the paper's order; "merge-prune" the reverse; "prune" and "merge" remove all
                  tokens in that one way, so that only the smaller count of each block matters.
    proportional  add log(size) to the attention logits of tokens that stand for several patches.
    mean          what a merged token becomes: the "plain" mean of its members, or one weighted by their "size"
                  or by their importance ("attention").
    choice        which tokens are merged away. "rank": those of least importance, as in the paper; "cost":
                  those that lose least, by (importance + floor x its mean) x (1 - similarity to the nearest
                  more important token).
    floor         for choice "cost": what every token is worth to the others, as a share of the mean importance.
    image_share   for class attention: the share of the importance that comes from image tokens, what the others
                  receive from a few of them spread evenly over the sequence; what the class token ignores may still
                  serve its neighbours.
    memory        the share of the importance that comes from where it was last asked for, in an earlier block: what
                  mattered there is let go more slowly. A merged token remembers what its members had together, so that
                  this goes with mean "attention".
    pruned_mass   whether the size of a pruned token, times its similarity, goes to the most similar image token that
                  stays, as that of a merged one does; its features are dropped all the same.
    size_aware    whether a token joins the most similar of those that are no smaller than itself (after ATM), where
                  there are any.
    keep_norm     whether a merged token keeps the largest norm among its members (after ToFu).
    seed          for the random importance.
    """

    importance: str = "auto"
    operation: str = "prune-merge"
    proportional: bool = True
    mean: str = "plain"
    choice: str = "rank"
    floor: float = 0.0
    image_share: float = 0.0
    memory: float = 0.0
    pruned_mass: bool = False
    size_aware: bool = False
    keep_norm: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for field, allowed in _ALLOWED.items():
            value = getattr(self, field)
            if value not in allowed:
                raise DiffRateError(f"{field} must be one of {', '.join(allowed)}, not {shown(value)}")
        if self.operation == "merge-prune" and self.choice == "cost":
            raise DiffRateError(
                "choice cost merges after pruning: with operation merge-prune take choice rank"
            )
        for field in ("proportional", *EXTRAS):
            if not isinstance(getattr(self, field), bool):
                raise DiffRateError(f"{field} must be true or false, not {shown(getattr(self, field))}")
        for field, most in (("floor", 1000), ("image_share", 1), ("memory", 1)):
            value = getattr(self, field)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= most:
                raise DiffRateError(f"{field} must be a number from 0 to {most}, not {shown(value)}")
        if self.floor and self.choice != "cost":
            raise DiffRateError(f"floor goes with choice cost, not with {self.choice}")
        if self.image_share and self.importance not in SHARED:
            raise DiffRateError(f"image_share goes with class attention, not with {self.importance}")
        if self.memory and self.mean != "attention":
            raise DiffRateError(f"memory goes with mean attention, not with {self.mean}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise DiffRateError(f"seed must be a whole number from 0 to {2**31 - 1}, not {shown(self.seed)}")

    @property
    def splits(self) -> bool:
        """Whether the removed tokens of a block are divided between pruning and merging."""
        return self.operation in ("prune-merge", "merge-prune")

    @property
    def has_extras(self) -> bool:
        return any(getattr(self, name) for name in EXTRAS)

    def in_words(self) -> str:
        """How it differs from the paper's operator."""
        # Class attention is the paper's; "auto" is what it is called before a model is known.
        plain = Operator(self.importance if self.importance in SHARED else "auto")
        changes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changes = {name: value for name, value in changes.items() if value != getattr(plain, name)}
        words = [name if value is True else f"{name} {value}" for name, value in changes.items()]
        return ", ".join(words) or "the paper's"

    def changed(self, **changes: Any) -> Operator:
        """A copy with every change that is not None.

        Another choice than by cost leaves no floor, another importance than class attention no image share, another
        mean than attention no memory.
        """
        changes = {k: v for k, v in changes.items() if v is not None}
        if changes.get("choice", "cost") != "cost":
            changes.setdefault("floor", 0.0)
        if changes.get("importance", "auto") not in SHARED:
            changes.setdefault("image_share", 0.0)
        if changes.get("mean", "attention") != "attention":
            changes.setdefault("memory", 0.0)
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_dict(cls, values: Any) -> Operator:
        if not isinstance(values, dict):
            raise DiffRateError("the operator in a schedule file must be an object")
        unknown = set(values) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            names = ", ".join(sorted(map(shown, unknown)))
            raise DiffRateError(f"the operator in a schedule file has unknown fields: {names}")
        return cls(**values)
