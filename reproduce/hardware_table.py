"""The paper's table "Results under multiple complexity constraints": MACs, latency, power and, with weights, accuracy.

Rows: the whole model, EViT-like pruning and a schedule for MACs alone on Gemmini's default design, and a co-search of
rates and design (DiffRate-M) whose targets are the paper's ratios, 37.6 of 68.1 ms and 90 of 156 mW. Without
--search the schedule for MACs alone is the published one, and the co-search moves it; with it both are learned. About
a minute without images; with them a few minutes on one H200.

    python reproduce/hardware_table.py --json results/hardware_deit_small.json
    python reproduce/hardware_table.py --model vit_tiny_patch16_224 --gmacs 0.81 --published 0.8 --checkpoint \\
        vit_tiny_patch16_224.safetensors --data-dir imagenet --search --json results/hardware_vit_tiny_h200.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

import diffrate
from diffrate import published
from diffrate.costs import Costs, Design, GemminiCost, MacCost, Workload
from diffrate.data import build_loader, search_datasets
from diffrate.evaluate import evaluate
from diffrate.methods.schedules import stepwise
from diffrate.models import load_model
from diffrate.results import write_results

PAPER = {  # GMACs, ms, mW, top-1 of DeiT-S
    "whole": (4.6, 68.1, 156, 79.82),
    "EViT": (3.0, 40.4, 99, 79.50),
    "DiffRate": (2.9, 40.1, 98, 79.83),
    "DiffRate-M": (2.9, 37.6, 90, 79.80),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--gmacs", type=float, default=2.9)
    parser.add_argument("--published", type=float, help="GMACs of the published schedule, if not --gmacs")
    parser.add_argument("--checkpoint")
    parser.add_argument("--data-dir", help="folder with search/ and val/ images")
    parser.add_argument("--search", action="store_true", help="learn the rates on the search/ images")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", help="folder for design, schedule and plot")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    accelerator = Accelerator(mixed_precision="fp16" if torch.cuda.is_available() else "no")
    model = load_model(arguments.model, arguments.checkpoint).eval()
    default = Costs([MacCost.of(model), GemminiCost(Workload.of(model), Design())])
    whole = default.price_of(None)
    start, remark = published.for_model(model, arguments.model, arguments.published or arguments.gmacs)
    print(remark or "")
    data: Any = None
    options: dict[str, Any] = {}
    if arguments.search:
        data = search_datasets(model, arguments.data_dir, split="search")
        options = {
            "accelerator": accelerator, "steps": arguments.steps, "batch_size": arguments.batch_size,
            "workers": arguments.workers, "progress": False,
        }  # fmt: skip
        start = diffrate.search(model, data, arguments.gmacs, **options).schedule
    ms, mw = 37.6 / 68.1 * whole["latency_ms"], 90 / 156 * whole["power_at_rate_mw"]
    joint = diffrate.cosearch(
        model, data, f"{arguments.gmacs}G,{ms:.4f}ms,{mw:.4f}mW", schedule=start, rounds=arguments.rounds,
        output=arguments.output, say=print, **options,
    )  # fmt: skip
    evit = stepwise(model, 3.0 / 2.9 * arguments.gmacs, diffrate.Operator(operation="prune"))
    schedules = {"whole": None, "EViT": evit, "DiffRate": start, "DiffRate-M": joint.schedule}
    rows: dict[str, dict[str, Any]] = {}
    for name, schedule in schedules.items():
        cost = joint.cost if name == "DiffRate-M" else default.price_of(schedule)
        rows[name] = {
            **cost,
            "ratios": [cost[m] / whole[m] for m in ("latency_ms", "power_at_rate_mw")],
            "paper_ratios": [PAPER[name][1] / 68.1, PAPER[name][2] / 156],
            "kept": None if schedule is None else list(schedule.effective.merge),
        }
        if arguments.checkpoint and arguments.data_dir:
            rows[name].update(accuracy(model, schedule, arguments, accelerator))
        print(name, rows[name], flush=True)
    print(joint.design)
    results = {"model": arguments.model, "rows": rows, "design": asdict(joint.design), "targets": [ms, mw]}
    write_results(arguments.json, shlex.join(["python", *sys.argv]), results, accelerator.device)


def accuracy(model: Any, schedule: Any, arguments: Any, accelerator: Accelerator) -> dict[str, float]:
    device = accelerator.device
    model.to(device)
    images = build_loader(
        model, arguments.data_dir, "", "val", 200, arguments.workers, crop_pct=1.0, device=device
    )
    if schedule is None:
        found = evaluate(model, images, device)
        return {"top1": found.top1, "loss": found.loss}
    found = evaluate(diffrate.compress(model, schedule), images, device, compare=model)
    c = found.comparison
    assert c is not None
    return {
        "top1": found.top1, "loss": found.loss, "top1_difference": c.top1_difference,
        "loss_rise": c.loss_difference, "loss_standard_error": c.loss_standard_error,
    }  # fmt: skip


if __name__ == "__main__":
    main()
