"""Charts as inline SVG. Colours come from the page's style sheet, so that they follow its theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from diffrate.report.html import Html, joined, tag
from diffrate.schedule import Schedule

LEFT, RIGHT, TOP, BOTTOM = 52, 10, 20, 36  # margins around the plotted area
DIGIT = 7  # pixels of one digit of a label


@dataclass(frozen=True)
class Counts:
    """What one block does: tokens that it keeps, merges into these, and prunes."""

    kept: int
    merged: int
    pruned: int


def block_counts(schedule: Schedule) -> list[Counts]:
    """What runs, block by block: the effective schedule under its operator."""
    running, received, found = schedule.effective, schedule.tokens, []
    for prune, merge in zip(running.prune, running.merge, strict=True):
        pruned = {"prune": received - merge, "merge": 0}.get(schedule.operator.operation, received - prune)
        if merge == schedule.prefix:  # no image token is left that another could join
            pruned = received - merge
        found.append(Counts(merge, received - merge - pruned, pruned))
        received = merge
    return found


def kept_chart(schedule: Schedule, width: int, height: int = 280) -> Html:
    """A bar a block: the tokens that it keeps, and above them those that it merges and prunes."""
    counts = block_counts(schedule)
    inner, bottom = width - LEFT - RIGHT, height - BOTTOM
    slot = inner / len(counts)
    bar = max(2.0, 0.72 * slot)

    def y(tokens: float) -> float:
        return bottom - tokens / schedule.tokens * (bottom - TOP)

    every = math.ceil(DIGIT * (len(str(schedule.tokens)) + 0.6) / slot)  # blocks a label has room for
    shapes = [_y_axis(nice_ticks(0, schedule.tokens), y, width)]
    for i, block in enumerate(counts):
        left, base = LEFT + (i + 0.5) * slot - bar / 2, 0
        words = f"block {i + 1}: {block.kept} kept, {block.merged} merged, {block.pruned} pruned"
        parts = []
        for name in ("kept", "merged", "pruned"):
            tokens = getattr(block, name)
            if tokens:
                top, tall = y(base + tokens), y(base) - y(base + tokens)
                parts.append(_rect(left, top, bar, tall, f"bar {name}"))
            base += tokens
        centre = LEFT + (i + 0.5) * slot
        if i % every == 0 or i == len(counts) - 1:
            above = y(base) - 5
            parts.append(_text(centre, above, str(block.kept), "value", "middle"))
            parts.append(_text(centre, bottom + 15, str(i + 1), "tick", "middle"))
        shapes.append(tag("g", tag("title", words), parts))
    shapes.append(_text(LEFT + inner / 2, height - 4, "block", "axis", "middle"))
    last = counts[-1].kept
    label = f"Kept tokens per block, from {schedule.tokens} down to {last}"
    return _svg(width, height, label, shapes)


@dataclass(frozen=True)
class Series:
    """points  (x, y) pairs; style  a class of the style sheet; dots  whether each point has one."""

    points: Sequence[tuple[float, float]]
    style: str
    dots: bool = False
    opacity: float | None = None


def line_chart(
    series: Sequence[Series],
    x_label: str,
    label: str,
    width: int = 330,
    height: int = 210,
    zero: bool = False,
) -> Html:
    """Lines and dots over a common x; with `zero` the y axis starts there."""
    points = [point for each in series for point in each.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = (0.0 if zero else min(ys)), max(ys)
    if high <= low:
        low, high = low - 0.5, low + 0.5
    ticks = nice_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    first, last = min(xs), max(xs)
    inner, bottom = width - LEFT - RIGHT, height - BOTTOM

    def x_at(x: float) -> float:
        return LEFT + (x - first) / max(last - first, 1e-12) * inner

    def y_at(y: float) -> float:
        return bottom - (y - low) / (high - low) * (bottom - TOP)

    shapes = [_y_axis(ticks, y_at, width)]
    for x in sorted({first, last, *([(first + last) // 2] if last - first > 3 else [])}):
        shapes.append(_text(x_at(x), bottom + 15, f"{x:g}", "tick", "middle"))
    shapes.append(_text(LEFT + inner / 2, height - 4, x_label, "axis", "middle"))
    for each in series:
        path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in each.points)
        if len(each.points) > 1:
            shapes.append(tag("polyline", points=path, class_=f"line {each.style}", opacity=each.opacity))
        if each.dots or len(each.points) == 1:
            shapes += [
                tag(
                    "circle", tag("title", f"{x_label} {x:g}: {y:.4g}"),
                    cx=f"{x_at(x):.1f}", cy=f"{y_at(y):.1f}", r=3.2, class_=f"dot {each.style}",
                )
                for x, y in each.points
            ]  # fmt: skip
    return _svg(width, height, label, shapes)


def interval_mark(value: float, interval: tuple[float, float], low: float, high: float, label: str) -> Html:
    """A dot with its interval on a line from `low` to `high`, and where zero is: a plot that fits a table's cell."""
    width, height, pad = 150, 22, 6

    def at(x: float) -> float:
        return pad + (x - low) / max(high - low, 1e-12) * (width - 2 * pad)

    middle = height / 2
    shapes = [
        tag("line", x1=f"{at(0):.1f}", x2=f"{at(0):.1f}", y1=2, y2=height - 2, class_="zero"),
        tag(
            "line", x1=f"{at(interval[0]):.1f}", x2=f"{at(interval[1]):.1f}", y1=middle, y2=middle, class_="whisker"
        ),
        tag("circle", cx=f"{at(value):.1f}", cy=middle, r=4, class_="dot"),
    ]  # fmt: skip
    return _svg(width, height, label, shapes, "mark")


def share_mark(before: float, after: float, label: str) -> Html:
    """Two shares from 0 to 1 on one line: a ring before, a dot after."""
    width, height, pad = 150, 22, 7
    a, b = (pad + share * (width - 2 * pad) for share in (before, after))
    middle = height / 2
    style = "worse" if after < before else "better"
    shapes = [
        tag("line", x1=pad, x2=width - pad, y1=middle, y2=middle, class_="rail"),
        tag("line", x1=f"{a:.1f}", x2=f"{b:.1f}", y1=middle, y2=middle, class_=f"whisker {style}"),
        tag("circle", cx=f"{a:.1f}", cy=middle, r=4, class_="ring"),
        tag("circle", cx=f"{b:.1f}", cy=middle, r=4, class_=f"dot {style}"),
    ]
    return _svg(width, height, label, shapes, "mark")


def nice_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers from about `low` to about `high`."""
    if high <= low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if raw <= factor * power * (1 + 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * i for i in range(first, last + 1)] or [low]


def _y_axis(ticks: Sequence[float], y: object, width: int) -> Html:
    assert callable(y)
    shapes = []
    for tick in ticks:
        at = y(tick)
        shapes.append(tag("line", x1=LEFT, x2=width - RIGHT, y1=f"{at:.1f}", y2=f"{at:.1f}", class_="grid"))
        shapes.append(_text(LEFT - 6, at + 4, f"{tick:.4g}", "tick", "end"))
    return joined(shapes)


def _rect(x: float, y: float, width: float, height: float, style: str) -> Html:
    return tag("rect", x=f"{x:.1f}", y=f"{y:.1f}", width=f"{width:.1f}", height=f"{height:.1f}", class_=style)


def _text(x: float, y: float, words: str, style: str, anchor: str) -> Html:
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", class_=style, text_anchor=anchor)


def _svg(width: int, height: int, label: str, shapes: Sequence[Html], style: str = "chart") -> Html:
    return tag(
        "svg", shapes, class_=style, viewBox=f"0 0 {width} {height}", width=width, height=height, role="img",
        aria_label=label,
    )  # fmt: skip
