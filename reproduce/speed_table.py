"""Write the speed tables of the documentation from results/speed_*.json, or check that they are up to date.

python reproduce/speed_table.py            # rewrites what lies between <!-- speed --> and <!-- /speed -->
python reproduce/speed_table.py --check    # exits with 1 where that would change something
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from diffrate.speed import UNCOMPRESSED, WITH_KERNELS

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": True, "docs/speed.md": False}  # whether the page shows only what matters most
START, END = "<!-- speed -->", "<!-- /speed -->"
COLUMNS = (
    "model",
    "GMACs",
    "dtype",
    "batch",
    "mode",
    "images/s",
    "oracle slice",
    "of oracle",
    "of uncompressed",
    "of that with our kernels",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stale = []
    for name, short in PAGES.items():
        page = ROOT / name
        if not page.is_file() or START not in (text := page.read_text(encoding="utf-8")):
            continue
        updated = rewritten(text, sorted((ROOT / "results").glob("speed_*.json")), short)
        if updated != text:
            stale.append(page.name)
            if not arguments.check:
                page.write_text(updated, encoding="utf-8")
    print("up to date" if not stale else f"{'stale' if arguments.check else 'updated'}: {', '.join(stale)}")
    sys.exit(1 if stale and arguments.check else 0)


def rewritten(text: str, files: list[Path], short: bool = False) -> str:
    """The page with its table made anew."""
    before, _, rest = text.partition(START)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{START} has no {END}")
    tables = [table(json.loads(path.read_text(encoding="utf-8")), path.name, short) for path in files]
    return f"{before}{START}\n\n{chr(10).join(tables)}\n{END}{after}"


def table(record: dict[str, Any], name: str, short: bool = False) -> str:
    """One file as a Markdown table: a line for each schedule in each mode, beside its oracle slice of the same run, and
    the uncompressed model with the kernels that compressed ones have, where that was timed.

    short  only models that are compiled or recorded as a graph, in fp16.
    """
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * 3 + "---:|---|" + "---:|" * 5]
    commits: dict[str, None] = {}
    beside: dict[str, Any] | None = None
    for row in record["results"]["rows"]:
        if row["name"] in (UNCOMPRESSED, WITH_KERNELS):
            beside = row if row["name"] == WITH_KERNELS else None
        if row["of_oracle"] is None or row.get("kernels", "auto") != "auto":
            continue
        if short and (row["mode"] == "eager" or row["dtype"] != "float16"):
            continue
        ceiling = row["images_per_second"] / row["of_oracle"]
        commits[str(row.get("commit") or record["commit"])[:10]] = None
        published = row["name"].endswith(" G")  # named by its own budget
        gmacs = row["name"][:-2] if published else f"{row['gmacs']:.1f}"
        lines.append(
            f"| {row['model']} | {gmacs} | {row['dtype']} | {row['batch_size']} | {row['mode']} "
            f"| {row['images_per_second']:,.0f} | {ceiling:,.0f} "
            f"| {row['of_oracle']:.3f} | {row['of_uncompressed']:.2f} "
            + (f"| {row['of_uncompressed'] / beside['of_uncompressed']:.2f} |" if beside else "| |")
        )
    made = f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"
    origin = f"`{record['command']}`, {record['device']}, torch {record['torch']}, {made}"
    return "\n".join([*lines, "", f"{origin} (`results/{name}`)", ""])


if __name__ == "__main__":
    main()
