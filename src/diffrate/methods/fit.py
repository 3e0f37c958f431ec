"""From a budget to a method's one parameter: methods are compared at equal MACs, whatever their papers tune."""

from __future__ import annotations

from collections.abc import Callable

from diffrate.errors import DiffRateError

HALVINGS = 60  # of the interval in which the parameter lies
TOLERANCE = 0.01  # of the budget, within which MACs count as equal
ROUNDING = (
    1e-9  # of the whole model's cost, within which a budget is that cost: 100 % of it may be a bit less
)


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


def off_budget(gmacs: float, budget: float) -> str:
    """What to say of a cost that does not count as equal to the budget; nothing of one that does."""
    return (
        ""
        if abs(gmacs - budget) <= TOLERANCE * budget
        else f"{100 * (gmacs / budget - 1):+.1f} % off the budget"
    )


def spends_all(budget: float, whole: float) -> bool:
    """Whether a budget is what the whole model costs, or more."""
    return budget >= (1 - ROUNDING) * whole


def asks_for_nothing(budget: float, whole: float) -> DiffRateError:
    """What `diffrate search` says too of a budget that the whole model meets."""
    return DiffRateError(
        f"a budget of {budget:.4g} GMACs asks for nothing: the whole model costs {whole:.4g} GMACs"
    )


def out_of_reach(method: str, budget: float, least: float, most: float) -> DiffRateError:
    return DiffRateError(
        f"{method} cannot meet a budget of {budget:.4g} GMACs: it reaches from {least:.4g} to {most:.4g}"
    )
