"""From a budget to a method's one parameter: methods are compared at equal MACs, whatever their papers tune."""

from __future__ import annotations

from collections.abc import Callable

from diffrate.errors import DiffRateError

HALVINGS = 60  # of the interval in which the parameter lies


def smallest_within(
    gmacs: Callable[[float], float], budget: float, method: str, halvings: int = HALVINGS
) -> float:
    """The smallest t in [0, 1] that costs at most `budget`, for a cost that falls with t."""
    least, most = gmacs(1.0), gmacs(0.0)
    if not least <= budget <= most:
        raise out_of_reach(method, budget, least, most)
    above, under = 0.0, 0.0 if budget == most else 1.0
    for _ in range(halvings):
        middle = (above + under) / 2
        above, under = (middle, under) if gmacs(middle) > budget else (above, middle)
    return under


def out_of_reach(method: str, budget: float, least: float, most: float) -> DiffRateError:
    return DiffRateError(
        f"{method} cannot meet a budget of {budget:.4g} GMACs: it reaches from {least:.4g} to {most:.4g}"
    )
