"""The result: in one sentence, in four numbers, and in a table beside the uncompressed model and known methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diffrate.methods import METHODS
from diffrate.report.charts import interval_mark
from diffrate.report.html import Html, tag
from diffrate.report.measured import SEARCHED, WHOLE
from diffrate.report.run import Run

TIMES = "\u00d7"
MINUS = "\u2212"
NAMES = {"tome": "ToMe", "evit": "EViT", "ats": "ATS", "atm": "ATM", "tofu": "ToFu"}


def sentence(run: Run, results: Mapping[str, Any]) -> str:
    """What came out, for somebody who reads no further."""
    name = run.model or "The model"
    after = run.schedule.cost.get("gmacs")
    before = _whole_gmacs(run, results)
    cost = "with fewer tokens"
    if after and before:
        cost = f"at {after / before:.0%} of its cost ({before:.3g} → {after:.3g} GMACs)"
    elif after:
        cost = f"at {after:.3g} GMACs"
    if not results:
        return f"{name} can run {cost}; what that does to accuracy and speed was not measured."
    found, _ = found_and_whole(results)
    points = found["comparison"]["top1_difference"]
    low, high = found["comparison"]["top1_interval"]
    than = (
        "as often right as"
        if abs(points) < 0.05
        else f"{abs(points):.1f} points {'below' if points < 0 else 'above'}"
    )
    sure = f"95 % interval {low:+.1f} to {high:+.1f}"
    return (
        f"{name} runs {found['speedup']:.2f} times as fast {cost} and scores {found['top1']:.1f} % top-1, "
        f"{than} the uncompressed model ({sure})."
    )


def found_and_whole(results: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows of the result and of the uncompressed model."""
    rows = {row["name"]: row for row in results["models"]}
    return rows[results["result"]], results["models"][0]


def _whole_gmacs(run: Run, results: Mapping[str, Any]) -> float | None:
    return float(results["models"][0]["gmacs"]) if results else run.whole_gmacs


def tiles(run: Run, results: Mapping[str, Any]) -> Html:
    """The four numbers that people ask for first."""
    before, after = _whole_gmacs(run, results), run.schedule.cost.get("gmacs")
    cells = []
    if before and after:
        cells.append(_tile(f"{after / before - 1:+.0%}", "MACs", f"{before:.3g} → {after:.3g} GMACs"))
    if results:
        found, whole = found_and_whole(results)
        points = found["comparison"]["top1_difference"]
        low, high = found["comparison"]["top1_interval"]
        cells.append(_tile(f"{points:+.1f}", "points of top-1", f"95 % interval {low:+.1f} to {high:+.1f}"))
        speeds = f"{whole['images_per_second']:.0f} → {found['images_per_second']:.0f} images/s"
        cells.append(_tile(f"{found['speedup']:.2f}{TIMES}", "speed", speeds))
    kept, tokens = run.schedule.effective.merge, run.schedule.tokens
    share = sum(kept) / (tokens * len(kept))
    cells.append(
        _tile(f"{share:.0%}", "of tokens on average", f"{tokens} → {kept[-1]} over {len(kept)} blocks")
    )
    return tag("ul", cells, class_="tiles", aria_label="The result in numbers")


def _tile(number: str, unit: str, detail: str) -> Html:
    return tag(
        "li",
        tag("strong", number.replace("-", MINUS)),
        tag("span", unit, class_="unit"),
        tag("small", detail),
    )


def comparison(results: Mapping[str, Any]) -> Html:
    """Every model on the same images, with what differs from the uncompressed one."""
    rows: Sequence[dict[str, Any]] = results["models"]
    ends = [end for row in rows[1:] for end in row["comparison"]["top1_interval"]]
    low, high = min([-0.5, *ends]), max([0.5, *ends])
    fastest = max(row["images_per_second"] for row in rows)
    heads = (
        "model",
        "top-1",
        "difference to uncompressed, points",
        "loss rise",
        "GMACs",
        "images/s",
        "speed-up",
    )
    head = tag("tr", [tag("th", text, scope="col") for text in heads])
    body = []
    for row in rows:
        versus, plain = row["comparison"], row["name"] == WHOLE
        ours = row["name"].startswith(SEARCHED)
        interval = versus["top1_interval"]
        words = (
            f"{versus['top1_difference']:+.1f} points, 95 % interval {interval[0]:+.1f} to {interval[1]:+.1f}"
        )
        mark = [
            interval_mark(versus["top1_difference"], interval, low, high, words),
            tag(
                "span",
                f"{versus['top1_difference']:+.1f} [{interval[0]:+.1f}, {interval[1]:+.1f}]",
                class_="number",
            ),
        ]
        bar = tag("meter", value=f"{row['images_per_second']:.1f}", max=f"{fastest:.1f}", aria_hidden="true")
        cells = [
            f"{row['top1']:.1f} %",
            "—" if plain else mark,
            "—" if plain else f"{versus['loss_difference']:+.3f} ± {versus['loss_standard_error']:.3f}",
            f"{row['gmacs']:.3f}",
            [bar, tag("span", f"{row['images_per_second']:.0f}", class_="number")],
            f"{row['speedup']:.2f}{TIMES}",
        ]
        body.append(
            tag(
                "tr",
                tag("th", NAMES.get(row["name"], row["name"]), scope="row", title=_about(row["name"])),
                [tag("td", cell, data_label=heads[i + 1]) for i, cell in enumerate(cells)],
                class_="ours" if ours else None,
            )
        )
    return tag("table", tag("thead", head), tag("tbody", body), class_="stacks comparison")


def _about(name: str) -> str | None:
    method = METHODS.get(name)
    return None if method is None else f"{method.line} ({method.paper})"
