"""How fast the published schedules are on a GPU, against the uncompressed model and the oracle slice of the same run.

The paper has no such table. First every kernel is checked
against its plain twin in fp64, then attention is timed by itself, then whole models. Random weights: speed does not
depend on them. Rows are written as they come; a run that ends early keeps its rows, and `--resume` skips those.

Cost: compiling takes most of it; the recorded run gave 20 minutes to processes that compiled side by side.

Measured here: results/speed_h200.json, DeiT-B compiled, 1,024 images in fp16: 1.91 times the uncompressed model at 8.7
GMACs and 1.47 at 11.5, 1.14 and 1.12 times the oracle slice. For one image, as a CUDA graph, the uncompressed DeiT-B
with our kernels is 1.47 times as fast as without, and under its schedules 1.26 and 1.25 times.

    python reproduce/speed.py --json results/speed_h200.json                    # checks, then all cases
    python reproduce/speed.py --json results/speed_h200.json --only deit_base --minutes 8
    python reproduce/speed.py --only checks                                      # also: kernels

`--turns` has several of these compile side by side, one after the other timed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from kernels_alone import checks, kernel_times
from turns import Turns

from diffrate import published
from diffrate.devices import resolve_device
from diffrate.models import load_model
from diffrate.results import write_results
from diffrate.speed import DTYPES, bench, profile

MEAN_POOLED = {"global_pool": "avg"}  # the paper's ViT-L and ViT-H are MAE's


@dataclass(frozen=True)
class Case:
    """One model with its budgets, in some modes, at one batch size."""

    model: str
    budgets: tuple[float, ...]
    batch: int
    modes: tuple[str, ...]
    kernels: str = "auto"

    def name(self, dtype: str) -> str:
        return f"{self.model} batch {self.batch} {dtype} {'+'.join(self.modes)} {self.kernels}"


CASES = (
    Case("deit_base_patch16_224", (8.7, 11.5), 1024, ("eager", "compiled")),
    Case("deit_small_patch16_224", (2.3, 2.9), 1024, ("eager", "compiled")),
    Case("deit_tiny_patch16_224", (0.6, 0.8), 1024, ("eager", "compiled")),
    Case("deit_base_patch16_224", (8.7, 11.5), 1, ("graph", "compiled-graph")),
    Case("vit_large_patch16_224", (31.0, 42.3), 1024, ("eager", "compiled")),
    Case("vit_large_patch16_224", (31.0, 42.3), 1, ("graph",)),
    Case("vit_huge_patch14_224", (83.7, 103.4), 256, ("eager", "compiled")),
    Case("vit_huge_patch14_224", (83.7, 103.4), 1, ("graph",)),
    # Without kernels, for comparison.
    Case("deit_base_patch16_224", (11.5,), 1024, ("eager",), "plain"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="run what has this in its name; checks and kernels are names too"
    )
    parser.add_argument("--dtypes", default="float16", help="float16,bfloat16")
    parser.add_argument(
        "--modes", default="", help="of each case only these: eager,compiled,graph,compiled-graph"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="start nothing new after this")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--no-profile", action="store_true", help="do not look where the time goes")
    parser.add_argument(
        "--batch", type=int, help="in place of every batch size above 1, to try the script out"
    )
    parser.add_argument("--budgets", default="", help="of each case only these GMACs")
    parser.add_argument("--turns", default="", help="FOLDER,N: beside others, timed in turns; see turns.py")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="keep the rows in --json and skip their cases")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = resolve_device(arguments.device)
    arguments.turn = Turns(arguments.turns).turn
    deadline = time.monotonic() + 60 * arguments.minutes
    results: dict[str, Any] = {"rows": [], "kernels": [], "profiles": []}
    if arguments.resume and arguments.json is not None and arguments.json.is_file():
        results |= json.loads(arguments.json.read_text())["results"]
    done = {row["case"] for row in results["rows"]}

    def save() -> None:
        if arguments.json is not None:
            write_results(arguments.json, shlex.join(["python", *sys.argv]), results, device)

    if arguments.only in "checks":
        for line in checks(device, [DTYPES[d] for d in arguments.dtypes.split(",")]):
            print(line, flush=True)
    if arguments.only in "kernels" and device.type == "cuda":
        with arguments.turn():
            for timing in kernel_times(device, arguments.batch or 1024):
                results["kernels"].append(timing)
                print("  ".join(f"{key} {value}" for key, value in timing.items()), flush=True)
        save()
    for dtype in arguments.dtypes.split(","):
        for case in CASES:
            name = case.name(dtype)
            if arguments.only not in name or name in done:
                continue
            if time.monotonic() > deadline:
                print(f"no time left for {name}", flush=True)
                continue
            started = time.monotonic()
            for rows in run(case, dtype, device, arguments):
                results["rows"] += [
                    {"case": name, "model": case.model, "kernels": case.kernels, **r} for r in rows
                ]
                save()
                show(rows, f"{name}: {rows[0]['mode']} ({time.monotonic() - started:.0f} s)")
                if time.monotonic() > deadline:
                    print(f"no time left for the rest of {name}", flush=True)
                    break
            profiled = case.batch > 1 and case.kernels == "auto" and not arguments.no_profile
            if profiled and time.monotonic() < deadline:
                results["profiles"] += profiles(case, dtype, device, arguments)
                save()
    print()
    print(table(results["rows"]))


def build(case: Case) -> Any:
    pooled = MEAN_POOLED if case.model.startswith("vit_") else {}
    return load_model(case.model, model_kwargs=pooled)


def run(
    case: Case, dtype: str, device: torch.device, arguments: argparse.Namespace
) -> Iterator[list[dict[str, Any]]]:
    model = build(case)
    budgets = [g for g in case.budgets if not arguments.budgets or f"{g:g}" in arguments.budgets.split(",")]
    schedules = {f"{g:g} G": published.for_model(model, case.model, g)[0] for g in budgets}
    batch = min(case.batch, arguments.batch or case.batch)
    wanted = arguments.modes.split(",") if arguments.modes else case.modes
    modes = [m for m in case.modes if m in wanted and (device.type == "cuda" or "graph" not in m)]
    for speeds in bench(
        model, schedules, [batch], device, dtype, modes,
        repeats=arguments.repeats, path=case.kernels, products=case.kernels == "auto", gate=arguments.turn,
    ):  # fmt: skip
        yield [asdict(speed) for speed in speeds]


def profiles(
    case: Case, dtype: str, device: torch.device, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    model = build(case)
    batch = min(case.batch, arguments.batch or case.batch)
    found = []
    for gmacs in case.budgets[-1:]:
        schedule = published.for_model(model, case.model, gmacs)[0]
        times = profile(model, schedule, batch, device, dtype, case.kernels)
        print("  " + ", ".join(f"{step} {ms:.2f} ms" for step, ms in times.items()), flush=True)
        found.append({"model": case.model, "gmacs": gmacs, "batch_size": batch, "dtype": dtype, "ms": times})
    return found


# --- is it right? -------------------------------------------------------------------------------------------------


def show(rows: list[dict[str, Any]], title: str) -> None:
    print(title)
    print(table(rows), flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'model':24s}{'row':42s}{'mode':15s}{'dtype':9s}{'batch':>6s}{'images/s':>10s}{'ms':>9s}"
             f"{'±':>7s}{'x whole':>9s}{'x oracle':>9s}{'saved':>7s}"]  # fmt: skip
    for r in rows:
        oracle = "" if r["of_oracle"] is None else f"{r['of_oracle']:.3f}"
        kind = "" if r.get("kernels", "auto") == "auto" else f" {r['kernels']}"
        saved = "" if r["saved_share"] is None else f"{r['saved_share']:.0%}"
        lines.append(
            f"{r.get('model', '')[:23]:24s}{r['name'] + kind:42s}"
            f"{r['mode']:15s}{r['dtype']:9s}{r['batch_size']:6d}{r['images_per_second']:10.0f}{r['ms']:9.3f}"
            f"{r['spread_ms']:7.3f}{r['of_uncompressed']:9.3f}{oracle:>9s}{saved:>7s}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
