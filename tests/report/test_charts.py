"""Charts: the numbers in the shapes."""

import itertools
import re
import xml.etree.ElementTree as ET

import pytest

from diffrate import Operator, Schedule
from diffrate.report.charts import (
    BOTTOM,
    TOP,
    Counts,
    Series,
    block_counts,
    interval_mark,
    kept_chart,
    line_chart,
    nice_ticks,
)

SCHEDULE = Schedule((10, 8, 9, 3, 1), (10, 6, 5, 3, 1))


def test_what_each_block_does() -> None:
    both = block_counts(SCHEDULE)  # block 3 receives 6: its 9 cannot prune
    assert both == [Counts(10, 0, 0), Counts(6, 2, 2), Counts(5, 1, 0), Counts(3, 0, 2), Counts(1, 0, 2)]
    merging = Schedule(SCHEDULE.prune, SCHEDULE.merge, operator=Operator(operation="merge"))
    # only the class token is left at the end: what goes has nothing to join
    assert [c.merged for c in block_counts(merging)] == [0, 4, 1, 2, 0]
    assert [c.pruned for c in block_counts(merging)] == [0, 0, 0, 0, 2]
    pruning = Schedule(SCHEDULE.prune, SCHEDULE.merge, operator=Operator(operation="prune"))
    assert [c.pruned for c in block_counts(pruning)] == [0, 4, 1, 2, 2]


def heights(svg: str, style: str) -> list[float]:
    root = ET.fromstring(svg)
    return [float(r.get("height", 0)) for r in root.iter("rect") if r.get("class") == f"bar {style}"]


def test_bars_are_in_proportion() -> None:
    svg = kept_chart(SCHEDULE, 400, 280)
    unit = (280 - TOP - BOTTOM) / 10
    assert heights(svg, "kept") == pytest.approx([n * unit for n in (10, 6, 5, 3, 1)], abs=0.06)
    assert heights(svg, "merged") == pytest.approx([n * unit for n in (2, 1)], abs=0.06)
    assert heights(svg, "pruned") == pytest.approx([n * unit for n in (2, 2, 2)], abs=0.06)
    assert "block 2: 6 kept, 2 merged, 2 pruned" in svg
    assert 'aria-label="Kept tokens per block, from 10 down to 1"' in svg


def test_many_blocks_have_room() -> None:
    deep = Schedule((197,) * 40, tuple(range(197, 157, -1)))
    labels = [
        t.get("x") for t in ET.fromstring(kept_chart(deep, 330)).iter("text") if t.get("class") == "value"
    ]
    gaps = [float(b) - float(a) for a, b in itertools.pairwise(labels[:-1])]  # type: ignore[arg-type]
    assert min(gaps) > 20


def test_lines_go_through_their_points() -> None:
    svg = line_chart([Series([(1, 0.0), (2, 10.0), (3, 5.0)], "strong")], "step", "words")
    points = re.search(r'points="([^"]+)"', svg)
    assert points
    (x1, y1), (x2, y2), (x3, y3) = (tuple(map(float, p.split(","))) for p in points[1].split())
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.11)
    assert y1 - y2 == pytest.approx(2 * (y1 - y3), abs=0.11)
    assert y1 > y3 > y2  # downwards on a screen
    for points in ([(5, 2.0)], [(0, 1.0), (9, 1.0)]):  # nothing to span an axis
        ET.fromstring(line_chart([Series(points, "strong")], "step", "words"))


def test_marks_and_ticks() -> None:
    svg = ET.fromstring(interval_mark(-1.0, (-2.0, 0.0), -4.0, 1.0, "words"))
    dot = float(next(svg.iter("circle")).get("cx", 0))
    zero, whisker = svg.iter("line")
    ends = float(whisker.get("x1", 0)), float(whisker.get("x2", 0))
    assert dot == pytest.approx(sum(ends) / 2, abs=0.06)
    assert ends[1] == float(zero.get("x1", 0))
    assert nice_ticks(0, 197) == [0, 50, 100, 150]
    assert nice_ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1]
    assert nice_ticks(3, 3) == [3]
