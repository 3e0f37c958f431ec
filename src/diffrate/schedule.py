"""Schedule: how many tokens each block keeps after pruning and after merging (the paper's schedule table).

Counts include the prefix tokens. Files are versioned JSON that also says for which model and input the schedule was
made, what it costs, which operator it is meant for and how it was found.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from diffrate.errors import DiffRateError, shown
from diffrate.operator import Operator

FORMAT = "diffrate.schedule"
VERSION = 1
LONGEST_FILE = 1 << 20  # bytes: a schedule takes a few thousand
MOST_TOKENS = 1 << 20


class ScheduleError(DiffRateError):
    """A schedule that cannot be right, or does not fit its model."""


@dataclass(frozen=True)
class Schedule:
    """Counts of kept tokens per block, prefix included, with what is known about their origin.

    prune, merge  one count a block: tokens left after pruning and after merging. The first block never removes
                  tokens, so its counts are the number of tokens the model starts with. Counts may rise from block
                  to block, as in some published schedules: `effective` is what runs.
    prefix        tokens that are never removed (class, distillation, registers).
    operator      the reduction the schedule was made for.
    model, img_size, cost, made   the timm model name, (height, width), costs such as {"gmacs": 2.9}, and the origin.
    """

    prune: tuple[int, ...]
    merge: tuple[int, ...]
    prefix: int = 1
    operator: Operator = Operator()
    model: str | None = None
    img_size: tuple[int, int] | None = None
    cost: Mapping[str, float] = field(default_factory=dict)
    made: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prune", _counts("prune", self.prune))
        object.__setattr__(self, "merge", _counts("merge", self.merge))
        if len(self.prune) != len(self.merge):
            raise ScheduleError(
                f"prune has {len(self.prune)} blocks and merge has {len(self.merge)}: give one count a block in each"
            )
        if type(self.prefix) is not int or not 0 <= self.prefix <= MOST_TOKENS:
            raise ScheduleError(f"prefix must be a whole number of at least 0, not {shown(self.prefix)}")
        if self.prune[0] != self.merge[0]:
            raise ScheduleError(
                "the first block is never compressed, so its two counts must be equal: "
                f"{self.prune[0]} and {self.merge[0]}"
            )
        least = max(self.prefix, 1)
        for name, counts in (("prune", self.prune), ("merge", self.merge)):
            for block, count in enumerate(counts):
                if not least <= count <= self.tokens:
                    raise ScheduleError(
                        f"{name}[{block}] is {count}: counts go from {least} (the tokens that are never removed) "
                        f"to {self.tokens} (the tokens of the first block)"
                    )
        if self.img_size is not None:
            object.__setattr__(self, "img_size", _img_size(self.img_size))

    @classmethod
    def identity(cls, depth: int, tokens: int, prefix: int = 1) -> Schedule:
        """The schedule that removes nothing."""
        return cls((tokens,) * depth, (tokens,) * depth, prefix)

    @classmethod
    def published(cls, model: str, gmacs: float) -> Schedule:
        """The paper's schedule for a timm model name at one of the published budgets."""
        from diffrate import published

        return published.by_name(model, gmacs)

    @property
    def depth(self) -> int:
        return len(self.prune)

    @property
    def tokens(self) -> int:
        """Tokens the first block receives."""
        return self.prune[0]

    @property
    def effective(self) -> Schedule:
        """The running minimum over prune[0], merge[0], prune[1], …: what a forward pass does."""
        running = list(itertools.accumulate(itertools.chain(*zip(self.prune, self.merge, strict=True)), min))
        return replace(self, prune=tuple(running[::2]), merge=tuple(running[1::2]))

    @property
    def is_monotone(self) -> bool:
        """Whether the counts never rise, so that the schedule is its own effective form."""
        effective = self.effective
        return effective.prune == self.prune and effective.merge == self.merge

    @property
    def removes_nothing(self) -> bool:
        return min(self.prune + self.merge) == self.tokens

    def resized(self, tokens: int) -> Schedule:
        """The same fractions of image tokens for an input with another number of tokens."""
        if tokens == self.tokens:
            return self
        scale = (tokens - self.prefix) / max(self.tokens - self.prefix, 1)

        def scaled(counts: tuple[int, ...]) -> tuple[int, ...]:
            """Where image tokens are left, one is left in the smallest image: heads may average them."""
            return tuple(
                min(tokens, self.prefix + max(round((n - self.prefix) * scale), int(n > self.prefix)))
                for n in counts
            )

        return replace(self, prune=scaled(self.prune), merge=scaled(self.merge), img_size=None, cost={})

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "img_size": None if self.img_size is None else list(self.img_size),
            "prefix": self.prefix,
            "prune": list(self.prune),
            "merge": list(self.merge),
            "operator": asdict(self.operator),
            "cost": dict(self.cost),
            "made": dict(self.made),
        }

    @classmethod
    def from_dict(cls, values: Any) -> Schedule:
        """The schedule in a decoded JSON file; ScheduleError for anything that is not one."""
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ScheduleError(f'this is no schedule: it has no "format": "{FORMAT}"')
        if type(values.get("version")) is not int or values["version"] != VERSION:
            raise ScheduleError(
                f"schedule version {shown(values.get('version'))} is not known here, only {VERSION}"
            )
        known = {"model", "img_size", "prefix", "prune", "merge", "operator", "cost", "made"}
        missing = {"prune", "merge"} - set(values)
        unknown = set(values) - known - {"format", "version"}
        if missing or unknown:
            what = "lacks" if missing else "has unknown fields"
            raise ScheduleError(f"the schedule {what} {', '.join(sorted(map(shown, missing or unknown)))}")
        fields = {k: v for k, v in values.items() if k in known}
        if "operator" in fields:
            fields["operator"] = Operator.from_dict(fields["operator"])
        if not isinstance(fields.get("model"), str | None):
            raise ScheduleError("the model name in a schedule must be text")
        for name in ("cost", "made"):
            if not isinstance(fields.get(name, {}), dict):
                raise ScheduleError(f"{name} in a schedule must be an object")
        for metric, value in fields.get("cost", {}).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
                raise ScheduleError(f"cost {shown(metric)} in a schedule must be a finite number")
        return cls(**fields)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schedule as JSON; a reader never sees half of it."""
        try:
            text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ScheduleError(f"cannot write this schedule as JSON: {error}") from error
        write_text(Path(path), text + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        path = Path(path)
        try:
            if path.is_fifo():  # which would be waited for without end
                raise ScheduleError(f"{path} is not a file")
            with path.open("rb") as file:
                text = file.read(LONGEST_FILE + 1)
            if len(text) > LONGEST_FILE:
                raise ScheduleError(f"{path} is too large to be a schedule")
            values = json.loads(text.decode(), parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
        except OSError as error:
            raise ScheduleError(
                f"cannot read the schedule {path}: {error.strerror or error}{_beside(path)}"
            ) from error
        except (ValueError, RecursionError) as error:
            if isinstance(error, ScheduleError):
                raise
            raise ScheduleError(f"{path} is not a JSON schedule: {error}") from error
        try:
            return cls.from_dict(values)
        except DiffRateError as error:
            raise ScheduleError(f"{path}: {error}") from error


def _beside(path: Path) -> str:
    """The schedules that lie where one was looked for: a search for several budgets names each by its own."""
    others = sorted(each.name for each in path.parent.glob("schedule*.json") if each.name != path.name)
    return f"; beside it are {', '.join(others)}" if others else ""


def check_is_file(path: Path) -> None:
    """Refuse a pipe or a device, which a reader would wait for without end; what is not there is said elsewhere."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise DiffRateError(f"{path} is not a file")


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    write_bytes(path, text.encode(errors="replace"))  # half a surrogate, as in names of other encodings


def write_bytes(path: Path, content: bytes) -> None:
    """The same for what is not text."""
    try:
        if (
            path.exists() and not path.is_file()
        ):  # as root, the move below would put a file in place of /dev/null
            raise DiffRateError(f"cannot write {path}: there is something that is not a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # or a power cut could leave the new name without its content
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise DiffRateError(f"cannot write {path}: {error.strerror or error}") from error


def _counts(name: str, values: Iterable[int]) -> tuple[int, ...]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ScheduleError(f"{name} must be a list of counts, one a block")
    counts = tuple(values)
    if not counts:
        raise ScheduleError(f"{name} is empty: give one count a block")
    for block, count in enumerate(counts):
        if isinstance(count, bool) or not isinstance(count, int):
            raise ScheduleError(f"{name}[{block}] must be a whole number, not {shown(count)}")
        if not 1 <= count <= MOST_TOKENS:
            raise ScheduleError(
                f"{name}[{block}] is {shown(count)}: a block keeps between 1 and {MOST_TOKENS} tokens"
            )
    return counts


def _img_size(value: Any) -> tuple[int, int]:
    pair = isinstance(value, list | tuple) and len(value) == 2
    if not pair or not all(type(v) is int and v > 0 for v in value):
        raise ScheduleError("img_size must be [height, width] in pixels")
    return value[0], value[1]


def _no_constant(name: str) -> None:
    raise ScheduleError(f"{name} is no number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        repeated = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ScheduleError(f"{shown(repeated)} is there twice")
    return values
