"""Write the tables of docs/training.md and docs/cluster.md from results/, or check that they are up to date.

    python reproduce/training_tables.py            # rewrites what lies between their marks
    python reproduce/training_tables.py --check    # exits with 1 where that would change something

Speed and expected times come from results/training_speed_*.json, accuracy from results/with_training_*.json.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NOT_YET = "*Not measured yet.*"
IMAGENET = 1_281_167  # training images
GLOBAL = 1024  # images of a step in the recipes, shared by the GPUs
MANY = 32  # four nodes of eight GPUs
LARGEST_STEP = 4096  # images for which a recipe may be stretched
PARAMETERS = {"deit_small_patch16_224": 22_050_664}
# Bytes a second at which a GPU exchanges gradients, if nothing of it hides behind the backward pass: an assumption.
INSIDE, BETWEEN = 300e9, 40e9
EPOCHS = {"30 epochs": 30, "300 epochs": 300}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--check", action="store_true")
    arguments = flags.parse_args()
    stale = []
    for path, text in pages(ROOT / "results").items():
        if path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if not arguments.check:
                path.write_text(text, encoding="utf-8")
    print("up to date" if not stale else f"{'stale' if arguments.check else 'updated'}: {', '.join(stale)}")
    sys.exit(1 if stale and arguments.check else 0)


def pages(results: Path) -> dict[Path, str]:
    """The two pages with their tables made anew."""
    made: dict[str, tuple[str, str, Callable[[dict[str, Any]], str]]] = {
        "speed": ("training.md", "training_speed_*.json", speed),
        "accuracy": ("training.md", "with_training_*.json", accuracy),
        "times": ("cluster.md", "training_speed_*.json", times),
    }
    found: dict[Path, str] = {}
    for mark, (page, pattern, table) in made.items():
        path = ROOT / "docs" / page
        text = found.get(path, path.read_text(encoding="utf-8"))
        files = sorted(results.glob(pattern))
        records = {file.name: json.loads(file.read_text()) for file in files}
        tables = [f"{table(record)}\n\n{origin(record, n)}" for n, record in records.items() if table(record)]
        found[path] = rewritten(text, mark, "\n\n".join(tables) or NOT_YET)
    return found


def rewritten(text: str, mark: str, table: str) -> str:
    start, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    if start not in text or end not in text:
        raise SystemExit(f"there is no {start} … {end}")
    between = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    return between.sub(lambda _: f"{start}\n\n{table}\n\n{end}", text)


def origin(record: dict[str, Any], name: str) -> str:
    rows = record["results"].get("rows", [])
    commits = list(dict.fromkeys(row.get("commit", record["commit"]) for row in rows)) or [record["commit"]]
    named = ", ".join(str(commit)[:10] for commit in commits)
    note = f". {record['note']}" if record.get("note") else ""
    return (
        f"`{record['command']}`, {record['device']}, torch {record['torch']}, "
        f"{'commit' if len(commits) == 1 else 'commits'} {named} (`results/{name}`){note}"
    )


def speed(record: dict[str, Any]) -> str:
    lines = [
        "| GMACs | batch | mode | images/s | oracle slice | uncompressed | of oracle | of uncompressed |",
        "|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    rows = record["results"]["rows"]
    for row in rows:
        if row["of_oracle"] is None or row["name"].endswith("plain"):
            continue
        ceiling, whole = (row["images_per_second"] / row[of] for of in ("of_oracle", "of_uncompressed"))
        lines.append(
            f"| {row['gmacs']:.2f} | {row['batch_size']} | {row['mode']} | {row['images_per_second']:,.0f} "
            f"| {ceiling:,.0f} | {whole:,.0f} | {row['of_oracle']:.2f} "
            f"| {row['of_uncompressed']:.2f} |"
        )
    return "\n".join(lines)


def accuracy(record: dict[str, Any]) -> str:
    results = record["results"]
    lines = [
        "| MACs | without tuning | fine-tuned | from scratch | recovered |",
        "|---|---:|---:|---:|---:|",
        f"| all ({results['gmacs']:.3f} G) | {results['uncompressed']:.2f} | {_control(results, 'fine-tuned')} "
        f"| {_control(results, 'from scratch')} | |",
    ]
    for name, budget in results["budgets"].items():
        recovered = f"{budget['recovered']:.0%}" if "recovered" in budget else ""
        lines.append(
            f"| {name} ({budget['gmacs']:.3f} G) | {budget['without tuning']:.2f} | {_mean(budget, 'fine-tuned')} "
            f"| {_mean(budget, 'from scratch')} | {recovered} |"
        )
    return "\n".join(
        [
            *lines,
            "",
            f"Top-1 % on {results['test_images']:,} test images. Epochs: {_epochs(results['runs'])}.",
        ]
    )


def _epochs(runs: list[dict[str, Any]]) -> str:
    """How many epochs the runs of each kind had, of how many their learning rate was planned for."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in runs:
        kinds.setdefault(row["name"], []).append(row)
    words = []
    for name, rows in kinds.items():
        had = sorted({row["epochs"] for row in rows})
        words.append(f"{name} {' to '.join(map(str, {had[0]: 0, had[-1]: 0}))} of {rows[0]['of_epochs']}")
    return "; ".join(words)


def _control(results: dict[str, Any], kind: str) -> str:
    found = [row["test_accuracy"] for row in results["runs"] if row["name"] == f"uncompressed, {kind}"]
    return f"{found[0]:.2f}" if found else ""


def _mean(budget: dict[str, Any], kind: str) -> str:
    if kind not in budget:
        return ""
    deviation = budget[kind]["deviation"]
    return f"{budget[kind]['mean']:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def times(record: dict[str, Any]) -> str:
    """Hours for ImageNet: a step of the recipes shared by so many GPUs that each has the batch that was measured."""
    results, seen = record["results"], set()
    lines = [
        f"| {results['model']} | images a GPU | mode | measured step | GPUs | {' | '.join(EPOCHS)} |",
        "|---|---:|---|---:|---:|" + "---:|" * len(EPOCHS),
    ]
    for row in results["rows"]:
        what = (row["gmacs"], row["batch_size"], row["mode"])
        others = row["name"].startswith("oracle") or row["name"].endswith(("plain", "by product"))
        if others or what in seen or row["mode"] == "compiled":  # the trainer compiles to graphs
            continue
        seen.add(what)
        images = row["batch_size"]
        shared = [max(1, GLOBAL // images)] + [MANY] * (images * MANY <= LARGEST_STEP)
        alone = [1] * (row["mode"] == "compiled-graph" and images < GLOBAL)  # a step in parts
        for gpus in alone + shared:
            hours = [expected_hours(row["ms"], n, gpus, images, results["model"]) for n in EPOCHS.values()]
            cells = " | ".join(f"{value:.1f} h" if value >= 1 else f"{60 * value:.0f} min" for value in hours)
            lines.append(
                f"| {row['gmacs']:.2f} G | {images} | {row['mode']} | {row['ms']:.1f} ms | {gpus} | {cells} |"
            )
    return "\n".join(lines) if seen else ""


def expected_hours(ms: float, epochs: int, gpus: int, images: int, model: str) -> float:
    """Steps x (the measured one + the exchange of fp32 gradients in a ring, none of it hidden); `images` a GPU."""
    steps = epochs * IMAGENET / (images * gpus)
    bytes_sent = 2 * (gpus - 1) / gpus * 4 * PARAMETERS.get(model, 0)
    exchange = bytes_sent / (INSIDE if gpus <= 8 else BETWEEN)
    return steps * (ms / 1000 + exchange) / 3600


if __name__ == "__main__":
    main()
