"""The part of docs/how_good.md on races: how many random schedules are better than the searched ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import markdown_table

RANDOM, LEAST = 10_000, 1000  # schedules of a race, and of one that is listed
OTHER_OPERATORS = {"operation prune": ", pruning alone", "the paper's": ", the paper's operator"}
BOTH_VIEWS = " and their mirror images"
CALIBRATION = "beyond-the-paper-how-right-the-whole-models-probabilities-are"  # the section of the evidence

Records = dict[Path, dict[str, Any]]
Row = dict[str, Any]

RACES = """\
## Among 10,000 random schedules

The same MACs and operator; how many of the 10,000 have a lower mean than a search, one number for each of several \
seeds. A hundred are 1 %, or twenty where 2,000 raced. Most schedules leave a race early, where they are clearly \
worse; of those, 500 were looked at again ([how, and what they showed](evidence.md#figure-10000-random-schedules)).
"""


def lines(records: Records, with_table: Callable[[Records, str], list[tuple[Path, Row]]]) -> Iterator[str]:
    """The races, and how right the probabilities are on which ranks by divergence rest."""
    raced = [(record["results"], table) for _, record in with_table(records, "schedule_comparison")
             if (table := record["results"]["tables"]["schedule_comparison"])]  # fmt: skip
    if not raced:
        return
    yield RACES
    yield "\n".join(ranks(raced)) + "\n"
    right = [how_right(record["results"]) for _, record in with_table(records, "calibration")]
    if right:
        yield (
            f"How right the probabilities are: {'; '.join(right)} ([calibration](evidence.md#{CALIBRATION})). "
            "Right ones have the loss that they expect, and 1 as their best temperature. Where they are not, the "
            "divergence says how near answers are, and no more.\n"
        )


def ranks(raced: Sequence[tuple[Row, Row]]) -> Iterator[str]:
    """How many of the random schedules are better than each search, a line for each race that was run to its end."""
    rows: list[list[str]] = []
    outside: dict[str, list[str]] = {"loss": [], "divergence": []}
    for results, table in raced:
        races = [
            row for row in table["rows"]
            if "better" in row and row["complete"] and row["schedules"] >= LEAST and row["search"].startswith("search")
        ]  # fmt: skip
        words = {row["budget"]: row["operator"] for row in table["rows"] if "operator" in row}
        for budget in sorted({row["budget"] for row in races}, reverse=True):
            at = [row for row in races if row["budget"] == budget]
            how = OTHER_OPERATORS.get(words.get(budget, ""), "")
            ranked = {by: [row["better"] for row in at if row["name"].endswith(by)] for by in outside}
            count = at[0]["schedules"]
            of = f" of {count:,}" * (count != RANDOM)
            counts = [", ".join(f"{better:,}" for better in each) + of for each in ranked.values()]
            images = f"{results['uncompressed']['images']:,}"
            views = BOTH_VIEWS * at[0].get("both_views", False)
            share = f"{100 * budget / results['gmacs']:.0f} %"
            rows.append([results["model"] + how, f"{budget:.3g} ({share})", images + views, *counts])
            for by, each in ranked.items():
                behind = [f"{100 * better / count:.2f} %" for better in each if better > count / 100]
                if behind:
                    these = f"{len(behind)} of {len(each)} searches ({', '.join(behind)})"
                    where = f"{results['model']}{how} at {budget:.3g} GMACs on {images} images{views}"
                    outside[by].append(f"{these} of {where}")
    header = ("", "GMACs", "images", "by loss", "by divergence from the whole model")
    yield from markdown_table.lines(header, rows)
    yield (
        "\nThe divergence is the rise of the loss that is to be expected where the whole model's "
        "probabilities are right: the same ranking without the chance of which labels these images have, though it is "
        "also what a search makes small, on images of its own. Where budgets are loose, few labels rank by chance: see "
        "the same searches on more images, or where an image counts by the mean of it and its mirror image."
    )
    for by, beyond in outside.items():
        yield f"\nNot in the best 1 % by {by}: {'; '.join(beyond) or 'none'}."


def how_right(results: Row) -> str:
    """What the whole model's loss says of its probabilities."""
    own, best = results["tables"]["calibration"]["rows"][:2]
    return (
        f"{results['model']} expects a loss of {own['expected_loss']:.3f} of itself and has {own['loss']:.3f}, with an "
        f"error of {own['standard_error']:.3f}, and would have the least, {best['loss']:.3f}, at a temperature of "
        f"{best['temperature']:.2f}"
    )
