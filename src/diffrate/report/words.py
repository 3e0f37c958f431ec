"""Numbers as the page writes them."""

from __future__ import annotations

TIMES, MINUS, THIN, HYPHEN = "\u00d7", "\u2212", "\u202f", "\u2011"
TOP1 = f"top{HYPHEN}1"  # which no line break may tear apart


def signed(value: float, digits: int = 1) -> str:
    """With its sign, a true minus, and none where it rounds to nothing."""
    text = f"{value:+.{digits}f}"
    if float(text) == 0:
        return f"{0:.{digits}f}"
    return text.replace("-", MINUS)


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}{THIN}%".replace("-", MINUS)


def interval(ends: tuple[float, float] | list[float], digits: int = 1) -> str:
    return f"{signed(ends[0], digits)} to {signed(ends[1], digits)}"
