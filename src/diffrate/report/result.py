"""The result: in one sentence, in four numbers, and in a table beside the uncompressed model and known methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diffrate.costs.base import METRICS
from diffrate.methods import METHODS
from diffrate.report.charts import interval_mark
from diffrate.report.html import Html, tag
from diffrate.report.measured import WHOLE
from diffrate.report.run import Run
from diffrate.report.words import THIN, TIMES, TOP1, interval, percent, signed

NAMES = {"tome": "ToMe", "evit": "EViT", "ats": "ATS", "atm": "ATM", "tofu": "ToFu"}


def sentence(run: Run, results: Mapping[str, Any]) -> str:
    """What came out, for somebody who reads no further."""
    name = run.model or "the model"
    before, after = _gmacs(run, results)
    cost = "With fewer tokens"
    if after and before:
        cost = f"At {percent(after / before)} of its cost ({before:.3g} → {after:.3g} GMACs)"
    elif after:
        cost = f"At {after:.3g} GMACs"
    if not results:
        return f"{cost}, {name} still has to show its accuracy and speed: nothing was measured yet."
    found, _ = found_and_whole(results)
    versus = found["comparison"]
    points = versus["top1_difference"]
    than = (
        f"{abs(points):.1f} points {'below' if points < 0 else 'above'}"
        if abs(points) >= 0.05
        else "level with"
    )
    return (
        f"{cost}, {name} scores {percent(found['top1'] / 100, 1)} {TOP1}, {than} the uncompressed model "
        f"(95{THIN}% interval {interval(versus['top1_interval'])}), and runs {found['speedup']:.2f} times as fast."
    )


def found_and_whole(results: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows of the result and of the uncompressed model."""
    rows = {row["name"]: row for row in results["models"]}
    return rows[results["found"][-1]], results["models"][0]


def _gmacs(run: Run, results: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Of the uncompressed model and of the result: as counted when measured, else as the search has them."""
    if results:
        found, whole = found_and_whole(results)
        return float(whole["gmacs"]), float(found["gmacs"])
    return run.whole.get("gmacs"), run.schedule.cost.get("gmacs")


def tiles(run: Run, results: Mapping[str, Any]) -> Html:
    """The numbers that people ask for first; costs beside MACs are what the search's cost models say."""
    before, after = _gmacs(run, results)
    cells = []
    if before and after:
        cells.append(_cost_tile(before, after, "MACs", "GMACs"))
    for metric, cost in run.schedule.cost.items():
        if metric in METRICS and metric != "gmacs" and metric in run.whole:
            words = METRICS[metric].words
            cells.append(_cost_tile(run.whole[metric], cost, f"{words} by the cost model", words))
    if results:
        found, whole = found_and_whole(results)
        versus = found["comparison"]
        sure = f"95{THIN}% interval {interval(versus['top1_interval'])}"
        cells.append(_tile(signed(versus["top1_difference"]), f"points of {TOP1}", sure))
        speeds = f"{whole['images_per_second']:.0f} → {found['images_per_second']:.0f} images/s"
        cells.append(_tile(f"{found['speedup']:.2f}{TIMES}", "speed", speeds))
    kept, tokens = run.schedule.effective.merge, run.schedule.tokens
    share = sum(kept) / (tokens * len(kept))
    cells.append(_tile(percent(share), "of tokens", f"mean of {len(kept)} blocks, {tokens} → {kept[-1]}"))
    return tag("ul", cells, class_="tiles", aria_label="The result in numbers")


def _cost_tile(before: float, after: float, unit: str, metric: str) -> Html:
    change = signed(100 * (after / before - 1), 0) + f"{THIN}%"
    return _tile(change, unit, f"{before:.3g} → {after:.3g} {metric}")


def _tile(number: str, unit: str, detail: str) -> Html:
    return tag("li", tag("strong", number), tag("span", unit, class_="unit"), tag("small", detail))


def comparison(results: Mapping[str, Any]) -> Html:
    """Every model on the same images, with what differs from the uncompressed one."""
    rows: Sequence[dict[str, Any]] = results["models"]
    all_ends = [end for row in rows[1:] for end in row["comparison"]["top1_interval"]]
    low, high = min([-0.5, *all_ends]), max([0.5, *all_ends])
    fastest = max(row["images_per_second"] for row in rows)
    heads = (
        "model",
        TOP1,
        "points to uncompressed",
        "loss rise",
        "GMACs",
        "images/s",
        "speed-up",
    )
    head = tag("tr", [tag("th", text, scope="col") for text in heads])
    body = []
    for row in rows:
        versus, plain = row["comparison"], row["name"] == WHOLE
        points, ends = versus["top1_difference"], versus["top1_interval"]
        words = f"{signed(points)} points, 95{THIN}% interval {interval(ends)}"
        mark = [
            interval_mark(points, ends, low, high, words),
            tag("span", f"{signed(points)} ({interval(ends)})", class_="number"),
        ]
        bar = tag("meter", value=f"{row['images_per_second']:.1f}", max=f"{fastest:.1f}", aria_hidden="true")
        cells = [
            percent(row["top1"] / 100, 1),
            "—" if plain else mark,
            "—" if plain else f"{signed(versus['loss_difference'], 3)} ± {versus['loss_standard_error']:.3f}",
            f"{row['gmacs']:.3f}",
            [bar, tag("span", f"{row['images_per_second']:.0f}", class_="number")],
            f"{row['speedup']:.2f}{TIMES}",
        ]
        body.append(
            tag(
                "tr",
                tag("th", NAMES.get(row["name"], row["name"]), scope="row", title=_about(row["name"])),
                [tag("td", cell, data_label=heads[i + 1]) for i, cell in enumerate(cells)],
                class_="ours" if row["name"] in results["found"] else None,
            )
        )
    return tag("table", tag("thead", head), tag("tbody", body), class_="stacks comparison")


def _about(name: str) -> str | None:
    method = METHODS.get(name)
    return None if method is None else f"{method.line} ({method.paper})"
