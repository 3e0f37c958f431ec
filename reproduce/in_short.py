"""The first part of docs/how_good.md: what the tables of docs/evidence.md come to, in sentences that the results write.

A method counts as behind the search in top-1 where McNemar's exact test says so, and in loss alone, which is less
noisy, where the 95 % interval of the paired difference lies above zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import equal_time
import markdown_table
import ranks

from diffrate.methods import METHODS
from diffrate.speed import WITH_KERNELS

TERMS = "beyond-the-paper-table-1-at-equal-terms-in-the-last-block"

Records = dict[Path, dict[str, Any]]
Row = dict[str, Any]

TABLE = """\
## Accuracy at equal MACs

A schedule says how many tokens each block keeps, an operator how they are chosen and merged. A search learns the \
former and brings its own operator; "the search's operator" is another method's counts under that one. Points of top-1 \
and rise of the loss against the uncompressed model, on the same images. * is behind the search in top-1 (McNemar's \
exact test, p < 0.05), ° in loss alone (the 95 % interval of the paired difference lies above zero). `embedded` is the \
small Fashion-MNIST transformer that ships with the package. Intervals and commands: [the evidence](evidence.md).
"""
NAMES = "What the rows are:\n"
SPEED = """\
## Speed
"""
ELSEWHERE = """\
How fast other models are: [speed.md](speed.md), and [training.md](training.md) for training; budgets in time and \
power, Table 3 among them: [budgets.md](budgets.md); segmentation: [models.md](models.md).
"""
IN_MIND = """\
## What to keep in mind

- One real model, ViT-Ti, with 2,000 ImageNet images to measure on, and one small model of our own; none of the \
paper's models on its data ([what was run](#what-was-run-and-what-was-not)).
- The operator of the search was chosen by the divergence on search images, with its numbers on the validation images \
in view: rows of ViT-Ti may be a little optimistic.
- Most of what is gained over the paper's schedule on ViT-Ti is the operator's, as the row of its counts under the \
search's operator says.
- Top-1 on 2,000 images is coarse, and does not always agree with the loss: some schedules of other models, moved \
over, have more top-1 than a search and a higher loss too ([transfer](evidence.md#figure-schedule-transfer)).
- Searched schedules, and nearly so the paper's, drop all tokens but the class token in the last block, where no other \
is read; the other methods carry theirs along, as in their papers, and are charged for it.
- `random` is one schedule, drawn once; what thousands of them have is in the races.
- Intervals are 95 % each, and there are many: some of those that just miss zero do so by chance.
- Merging by cost takes time that pruning does not, so that equal MACs are not equal time; the table at equal time \
holds searches in milliseconds against the paper's schedules. On a CPU, without kernels for it, other methods are \
faster at the same MACs. Larger models were not timed on images.
- A good part of the speed on a GPU is that of kernels, not of fewer tokens: the whole ViT-Ti with them is faster than \
any rival that runs as torch has it, but for EViT. A last block that runs for the class token alone, as under a \
schedule, would bring it to 1.66 times, which is what a search in milliseconds found when it was asked for 1.62: at \
80 % of the MACs nothing is gained yet. The larger the model, the smaller the part of kernels; for single images it is \
larger than in batches, and the paper's schedules of DeiT-B and ViT-L are slower there than kernels alone \
([speed.md](speed.md)).
- The times of lower resolution have the resizing of the images in them, two sizes a batch; those of ATS cannot be \
recorded as a graph.
- Tables of methods and speeds are of two runs, in batches of 250 and of 1,000 images in half precision, whose \
rounding moves a row's top-1 by up to 0.2 points.
- A search is that of the commit which its file names. Those of Table 2, of the softened answers, of beginnings on \
a CPU and of the comparison on a CPU are earlier than the others.
"""


def lines(records: Records, with_table: Callable[[Records, str], list[tuple[Path, Row]]]) -> Iterator[str]:
    """The answer, all methods at a glance, their speed, the races, and what to keep in mind."""
    found = [(path, r) for path, r in with_table(records, "off_the_shelf") if measured(r["results"])]
    if not found:
        return
    compared = timed_on_gpu(records)
    yield headline(found[0][1]["results"], [record["results"] for record in compared.values()])
    yield TABLE
    uncharged = {
        record["results"]["model"]: record["results"] for _, record in with_table(records, "last_block")
    }
    for _, record in found:
        yield "\n".join(all_methods(record["results"])) + "\n"
        yield "\n".join(against_the_search(record["results"])) + "\n"
        if other := uncharged.get(record["results"]["model"]):
            yield at_equal_terms(record["results"], other)
    yield NAMES
    yield "\n".join(f"- `{m.name}`: {m.line}" for m in METHODS.values() if not m.trained) + "\n"
    yield SPEED
    for path, record in compared.items():
        yield speeds(path, record["results"], record["device"], records) + "\n"
    for path, record in records.items():
        if path.name.startswith("compare_") and path not in compared:
            yield elsewhere(path, record)
    yield ELSEWHERE
    yield from ranks.lines(records, with_table)
    yield IN_MIND


def measured(results: Row) -> list[Row]:
    return [row for row in results["tables"]["off_the_shelf"]["rows"] if "points" in row]


def timed_on_gpu(records: Records) -> Records:
    """Comparisons with their speed on a GPU: these have a plot beside them."""
    return {
        path: record for path, record in records.items()
        if path.name.startswith("compare_") and "NVIDIA" in record["device"]
        and record["results"]["uncompressed"].get("speed")
    }  # fmt: skip


def headline(results: Row, compared: Sequence[Row]) -> str:
    """What the search loses at the tightest budget, how fast it is there, and what a few others lose."""
    rows = measured(results)
    tightest = min(row["budget"] for row in rows)
    at = {row["name"]: row for row in rows if row["budget"] == tightest}
    others = ("published, the search's operator", "published", "tome", "evit", "resolution")
    said = [f"{shown(name)} {at[name]['points']:+.2f}" for name in others if name in at]
    fast = [
        (row["speed"]["of_uncompressed"], each) for each in compared
        if each["model"] == results["model"]
        for row in each["rows"] if row["method"] == "searched" and row["budget"] == tightest and row.get("speed")
    ]  # fmt: skip
    speed = ""
    if fast:
        times, timed = fast[0]
        against = held_against_alike(timed, [times])
        speed = f", and it runs {times:.2f} times as fast{', or ' * bool(against)}{against}"
    own = points(at["search"]) if "search" in at else "not measured"
    return (
        f"**{results['model']} at {100 * tightest / results['gmacs']:.0f} % of its MACs, its weights untouched: "
        f"{own} points of top-1 by a search, on {results['uncompressed']['images']:,} images{speed}.** "
        f"Others at the same MACs: {', '.join(said) or 'none'}.\n"
    )


def points(row: Row) -> str:
    low, high = row["points_interval"]
    return f"{row['points']:+.2f} [{low:+.2f}, {high:+.2f}]"


def against_the_search(results: Row) -> Iterator[str]:
    """A line a budget: what the search loses, and who is not behind it."""
    rows = measured(results)
    for budget in dict.fromkeys(row["budget"] for row in rows):
        at = [row for row in rows if row["budget"] == budget]
        own = next((row for row in at if row["name"] == "search"), None)
        if own is None:
            continue
        sides = {
            words: [shown(row["name"]) for row in at if "to_search" in row and side(row) == words]
            for words in SIDES
        }
        said = [f"{words}: {', '.join(sides[words])}" for words in (AHEAD, ALIKE) if sides[words]]
        if any(sides[words] for words in BEHIND):
            said.append("all others are behind it")
        loses = f"the search changes top-1 by {points(own)} points"
        yield (f"- {budget:.3g} GMACs, {100 * budget / results['gmacs']:.0f} %: {'; '.join([loses, *said])}.")


def at_equal_terms(charged: Row, results: Row) -> str:
    """Who is on another side of the search where no method pays for what its last block spends in vain."""
    before = {(row["name"], row["budget"]): side(row) for row in measured(charged) if "to_search" in row}
    rows = [
        (row, side(row))
        for row in results["tables"]["last_block"]["rows"]
        if "to_search" in row and (row["name"], row["budget"]) in before
    ]
    moved: dict[str, list[str]] = {}
    for row, now in rows:
        if now != before[row["name"], row["budget"]]:
            moved.setdefault(now, []).append(f"{shown(row['name'])} at {row['budget']:.3g}")
    said = "; ".join(f"{words}: {', '.join(names)}" for words, names in moved.items())
    return (
        f"Not charged for the MLP of its last block on tokens that nothing reads, and spending as much more before, "
        f"{sum(map(len, moved.values()))} of {len(rows)} rows change sides ([table](evidence.md#{TERMS}))"
        f"{': ' * bool(said)}{said}.\n"
    )


def shown(name: str) -> str:
    """A row's name where commas stand between names."""
    return name.replace(", the search's operator", " under the search's operator")


SURE = 0.05
BEHIND = ("behind it in top-1", "behind it in loss alone")
AHEAD, ALIKE = "ahead of it", "no clear difference to it"
SIDES = (*BEHIND, AHEAD, ALIKE)


def side(row: Row) -> str:
    """Which of SIDES a row is on, by its paired difference to the search."""
    to = row["to_search"]
    sure = to["mcnemar_p"] < SURE
    less, more = to["loss_interval"]
    if sure and to["points"] < 0:
        return BEHIND[0]
    if sure or more < 0:
        return AHEAD
    return BEHIND[1] if less > 0 else ALIKE


def held_against_alike(results: Row, times: Sequence[float]) -> str:
    """How many times as fast that is against a whole model that has the kernels of compressed ones; "" if not timed."""
    beside = results["uncompressed"].get("speed_with_kernels")
    if not beside:
        return ""
    said = ", ".join(f"{each / beside['of_uncompressed']:.2f}" for each in times)
    return f"{said} where the whole model has the same kernels"


def speeds(path: Path, results: Row, device: str, records: Records) -> str:
    """How many times as fast as the uncompressed model every method was, at each budget."""
    whole, rows = results["uncompressed"], results["rows"]
    of = {(row["method"], row["budget"]): row["speed"]["of_uncompressed"] for row in rows if row.get("speed")}
    methods, budgets = (list(dict.fromkeys(key[i] for key in of)) for i in range(2))
    header = ("times as fast", *(f"{budget:.3g} GMACs" for budget in budgets))
    own = {row["method"]: row["speed"]["mode"] for row in rows if row.get("speed")}
    mode = whole["speed"]["mode"]
    said = {name: name if own[name] == mode else f"{name} ({own[name]})" for name in methods}
    cells = [
        [said[name], *(f"{of[name, b]:.2f}" if (name, b) in of else "" for b in budgets)] for name in methods
    ]
    cells += alike_row(results, len(budgets))
    how = whole["speed"]
    return (
        f"Images per second, on an {device} ({how['mode']}, {how['dtype']}, {how['batch_size']} images a batch), as "
        f"multiples of the uncompressed {results['model']}'s {how['images_per_second']:,.0f} "
        f"([file](../results/{path.name})):\n\n"
        f"{chr(10).join(markdown_table.lines(header, cells))}\n\n"
        "These are times of what runs here, not of what could: schedules have kernels of ours, EViT, ToMe and the "
        "other rules run as torch has them. "
        f"Rows that no other row beats in both speed and loss: {front(rows)}."
        f"{what_any_could_have(results)}\n\n{at_equal_time(records)}"
        f"![Accuracy against MACs, and against images per second](../results/{path.with_suffix('.png').name})"
    )


def alike_row(results: Row, columns: int) -> Iterator[list[str]]:
    """A row of the whole model with the kernels of compressed ones, where that was timed."""
    if beside := results["uncompressed"].get("speed_with_kernels"):
        yield [WITH_KERNELS] + [f"{beside['of_uncompressed']:.2f}"] * columns


def at_equal_time(records: Records) -> str:
    """A table: what searches in milliseconds have, and the paper's schedules where they take as long."""
    made, lines = equal_time.ROWS, []
    for path, record in records.items():
        tables = record["results"]["tables"] if path.name.startswith("reproduce_") else {}
        rows = tables.get("equal_time", {}).get("rows", ())
        whole = next((row["ms"] for row in rows if row["name"] == "uncompressed"), 0.0)
        for target in dict.fromkeys(row["target_ms"] for row in rows if "target_ms" in row):
            at = {row["name"]: row for row in rows if row.get("target_ms") == target}
            cells = [
                f"{at[name]['loss_rise']:+.3f} ({at[name]['speed']:.2f})" if name in at else ""
                for name in made
            ]
            if not {equal_time.IN_MS, equal_time.AS_FAST} <= at.keys():
                continue  # from a run that ended early
            to = at[equal_time.AS_FAST]["to_search"]
            low, high = to["loss_interval"]
            cells += [points(to), f"{to['loss_difference']:+.3f} [{low:+.3f}, {high:+.3f}]"]
            lines.append([f"{whole / target:.2f}", *cells, side(at[equal_time.AS_FAST])])
    if not lines:
        return ""
    header = ("asked for", *made, "its points to the search in ms", "its loss to it", "")
    return (
        "At equal time: searches in milliseconds, under the default operator and under the paper's with weighted means "
        'and kept norms ("by rank"), and the paper\'s schedules under its own, moved to where a measured table says '
        "that they take as long. The rise of the loss, and how many times as fast each turned out to be:\n\n"
        f"{chr(10).join(markdown_table.lines(header, lines))}\n\n"
    )


def what_any_could_have(results: Row) -> str:
    """How much of the speed is that of kernels which any model could have."""
    its = [row["speed"]["of_uncompressed"] for row in results["rows"] if row["method"] == "searched"]
    against = held_against_alike(results, its)
    if not against or not its:
        return ""
    return (
        " Schedules have kernels that are faster also where no token goes, which any model can have "
        f"(`diffrate.with_kernels`): in multiples of the whole model's speed searched ones have {against} "
        "([speed.md](speed.md))."
    )


def elsewhere(path: Path, record: Row) -> str:
    """A comparison that was timed on a CPU, in a sentence."""
    results = record["results"]
    how = results["uncompressed"].get("speed")
    if not how:
        return ""
    budgets = list(dict.fromkeys(row["budget"] for row in results["rows"]))
    each = ", ".join(
        f"{row['method']} {row['speed']['of_uncompressed']:.2f}"
        + (f" at {row['budget']:.3g}" if len(budgets) > 1 else "")
        for row in results["rows"]
        if row.get("speed")
    )
    at = f" at {budgets[0]:.3g} GMACs" if len(budgets) == 1 else ""
    where = f"{record['device']}, {how['mode']}, {how['dtype']}, {how['batch_size']} images a batch"
    origin = f"[file](../results/{path.name}), commit {str(record['commit'])[:10]}"
    return f"On a CPU ({where}) {results['model']}{at} is so many times as fast: {each} ({origin}).\n"


def front(rows: Sequence[Row]) -> str:
    """The rows that no other beats in speed and loss at once, from the slowest on."""
    timed = [row for row in rows if row.get("speed")]

    def beats(other: Row, row: Row) -> bool:
        mine, its = ((each["speed"]["of_uncompressed"], -each["loss"]) for each in (other, row))
        return mine != its and mine[0] >= its[0] and mine[1] >= its[1]

    best = [row for row in timed if not any(beats(other, row) for other in timed)]
    best.sort(key=lambda row: row["speed"]["of_uncompressed"])
    return ", ".join(
        f"{row['method']} at {row['budget']:.3g} ({row['speed']['of_uncompressed']:.2f}, "
        f"{row['to_uncompressed']['loss_difference']:+.3f})"
        for row in best
    )


MARKS = dict(zip(BEHIND, "*°", strict=True))


def all_methods(results: Row) -> Iterator[str]:
    rows = measured(results)
    names, budgets = (list(dict.fromkeys(row[key] for row in rows)) for key in ("name", "budget"))
    at = {
        (row["name"], row["budget"]): f"{row['points']:+.2f}, {row['loss_rise']:+.3f}"
        + (MARKS.get(side(row), "") if "to_search" in row else "")
        + (f" ({row['padded_gmacs']:.3f} in batches)" if "padded_gmacs" in row else "")
        for row in rows
    }
    whole = results["uncompressed"]
    header = (
        f"{results['model']}, top-1 {whole['top1']:.2f}",
        *(f"{budget:.3g} GMACs" for budget in budgets),
    )
    yield from markdown_table.lines(
        header, ([name, *(at.get((name, b), "") for b in budgets)] for name in names)
    )
