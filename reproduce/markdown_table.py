"""Lines of a Markdown table, for the pages that are written from results/."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield line(header)
    yield "|" + "---|" * len(header)
    yield from map(line, rows)


def line(cells: Sequence[str]) -> str:
    """A stroke within a cell, as in |V|, is not the end of it."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
