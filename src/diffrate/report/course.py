"""What the search found and how it got there: kept tokens per block, and the course of each budget."""

from __future__ import annotations

from typing import Any

from diffrate.report.charts import Series, block_counts, kept_chart, line_chart
from diffrate.report.html import Html, tag
from diffrate.report.run import Run
from diffrate.schedule import Schedule

WIDE, NARROW = 910, 330  # the charts of kept tokens: one for a desk, one for a phone
SHADES = 12  # lines that show how the schedule changed


def kept(run: Run) -> Html:
    """A chart of every schedule, and its numbers as a table."""
    return tag("div", [_kept(schedule, len(run.schedules) > 1) for schedule in run.schedules])


def _kept(schedule: Schedule, named: bool) -> Html:
    legend = tag(
        "ul",
        [tag("li", tag("span", class_=f"swatch {name}"), text) for name, text in _LEGEND],
        class_="legend",
    )
    counts = block_counts(schedule)
    heads = tag(
        "tr", [tag("th", text, scope="col") for text in ("block", "kept", "merged here", "pruned here")]
    )
    rows = [
        tag("tr", tag("th", i + 1, scope="row"), [tag("td", n) for n in (c.kept, c.merged, c.pruned)])
        for i, c in enumerate(counts)
    ]
    return tag(
        "figure",
        tag("figcaption", f"Budget {budget_name(schedule)}") if named else None,
        legend,
        tag("div", kept_chart(schedule, WIDE), class_="wide"),
        tag("div", kept_chart(schedule, NARROW, 240), class_="narrow"),
        tag(
            "details",
            tag("summary", "The same as a table"),
            tag("table", tag("thead", heads), tag("tbody", rows), class_="numbers"),
        ),
    )


_LEGEND = (
    ("kept", "kept"),
    ("merged", "merged into a kept one in this block"),
    ("pruned", "pruned in this block"),
)


def budget_name(schedule: Schedule) -> str:
    return str(schedule.made.get("budget") or "") or f"{schedule.cost.get('gmacs', 0):.3g} GMACs"


def course(run: Run) -> Html | None:
    """Loss, held-out divergence and schedule in the course of the search; None where the folder has no history."""
    if not run.steps:
        return None
    budgets = list(dict.fromkeys(entry["budget"] for entry in run.steps))
    return tag("div", [_course(run, budget, len(budgets) > 1) for budget in budgets])


def _course(run: Run, budget: str, named: bool) -> Html:
    entries: list[dict[str, Any]] = [entry for entry in run.steps if entry["budget"] == budget]
    checked = [(entry["step"] + 1, entry["held_out"]) for entry in entries if "held_out" in entry]
    charts = [
        _figure(
            "Loss of the batch",
            line_chart(
                [Series([(e["step"] + 1, e["loss"]) for e in entries], "quiet")], "step", "Loss, step by step"
            ),
        )
    ]
    if checked:
        last = _schedule_of(run, budget)
        best = None if last is None else last.made.get("best_step")
        taken = [point for point in checked if point[0] == best]
        charts.append(
            _figure(
                "Divergence on held-out images" + ("; filled: the schedule that was taken" if taken else ""),
                line_chart(
                    [
                        Series(checked, "hollow", dots=True),
                        *([Series(taken, "strong", dots=True)] if taken else []),
                    ],
                    "step",
                    "Divergence from the uncompressed model on held-out images",
                    zero=True,
                ),
            )
        )
    if len(entries) > 1:
        picked = [entries[round(i * (len(entries) - 1) / (SHADES - 1))] for i in range(SHADES)]
        lines = [
            Series(list(enumerate(e["kept"], 1)), "quiet", opacity=round(0.15 + 0.5 * i / SHADES, 2))
            for i, e in enumerate(picked[:-1])
        ]
        lines.append(Series(list(enumerate(picked[-1]["kept"], 1)), "strong"))
        charts.append(
            _figure(
                "Kept tokens, from the first step (faint) to the last",
                line_chart(lines, "block", "Kept tokens per block as the search went on", zero=True),
            )
        )
    heading = tag("h3", f"Budget {budget}") if named else None
    return tag("div", heading, tag("div", charts, class_="charts"))


def _schedule_of(run: Run, budget: str) -> Schedule | None:
    return next((s for s in run.schedules if s.made.get("budget") == budget), None)


def _figure(caption: str, chart: Html) -> Html:
    return tag("figure", tag("figcaption", caption), chart)
