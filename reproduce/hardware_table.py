"""The paper's table "Results under multiple complexity constraints": MACs, latency, power and, with weights, accuracy.

Rows: the whole model, EViT and a schedule for MACs alone on Gemmini's default design; a co-search of rates and design
(DiffRate-M) whose targets are the paper's ratios, 37.6 of 68.1 ms and 90 of 156 mW; and one that may not have a larger
array than the default design. Without --search the schedule for MACs alone is the published one, and the co-searches
move it; with it all are learned, or start from --schedule.

Cost: about a minute without images; with them a quarter of an hour on two CPU cores, and more with --search.

Measured here: results/hardware_deit_small.json, no accuracy: DiffRate-M takes 0.447 of the whole model's time and 0.530
of its power, with an array no larger than the default 0.549 and 0.572 (the paper: 0.552 and 0.577).
results/hardware_vit_tiny_cpu.json, searched counts (results/search_vit_tiny_h200.json) moved and not learned anew:
top-1 75.25 and 74.90 of 75.25. results/hardware_embedded_cpu.json, learned in every round: 91.55 and 91.45 of 91.40.

    python reproduce/hardware_table.py --json results/hardware_deit_small.json
    python reproduce/hardware_table.py --model vit_tiny_patch16_224 --gmacs 0.81 \\
        --schedule runs/searched_0.81.json --checkpoint imagenet/vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet --json results/hardware_vit_tiny_cpu.json
    python reproduce/hardware_table.py --model embedded --gmacs 0.228 --search --json results/hardware_embedded_cpu.json
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
from setting import ended_in_a_sentence
from torch import nn

import diffrate
from diffrate import embedded, published
from diffrate.costs import Costs, Design, GemminiCost, MacCost, Workload
from diffrate.data import build_loader, search_datasets
from diffrate.evaluate import compare_evaluations, evaluate_in_turn
from diffrate.methods.evit import EViT
from diffrate.methods.policy import PolicyModel
from diffrate.models import load_model
from diffrate.results import write_results

PAPER = {  # GMACs, ms, mW, top-1 of DeiT-S
    "whole": (4.6, 68.1, 156, 79.82),
    "EViT": (3.0, 40.4, 99, 79.50),
    "DiffRate": (2.9, 40.1, 98, 79.83),
    "DiffRate-M": (2.9, 37.6, 90, 79.80),
    "DiffRate-M, 16x16 at most": (2.9, 37.6, 90, 79.80),
}
METRICS = ("latency_ms", "power_at_rate_mw")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--gmacs", type=float, default=2.9)
    parser.add_argument("--published", type=float, help="GMACs of the published schedule, if not --gmacs")
    parser.add_argument("--schedule", help="the schedule for MACs alone, if it is known")
    parser.add_argument("--checkpoint")
    parser.add_argument(
        "--data-dir", help="folder with search/ and val/ images; the embedded model needs none"
    )
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
    if arguments.schedule:
        start = diffrate.Schedule.load(arguments.schedule)
    elif not arguments.search:
        start, remark = published.for_model(model, arguments.model, arguments.published or arguments.gmacs)
        print(remark or "")
    data: Any = None
    options: dict[str, Any] = {}
    if arguments.search:
        ships = arguments.model == embedded.NAME
        data = (
            embedded.dataset("search")
            if ships
            else search_datasets(model, arguments.data_dir, split="search")
        )
        options = {
            "accelerator": accelerator, "steps": arguments.steps, "batch_size": arguments.batch_size,
            "workers": arguments.workers, "progress": False,
        }  # fmt: skip
        if not arguments.schedule:
            start = diffrate.search(model, data, arguments.gmacs, **options).schedule
    ms, mw = 37.6 / 68.1 * whole["latency_ms"], 90 / 156 * whole["power_at_rate_mw"]
    joint = {
        name: diffrate.cosearch(
            model, data, f"{arguments.gmacs}G,{ms:.4f}ms,{mw:.4f}mW", schedule=start, rounds=arguments.rounds,
            largest_array=largest, output=arguments.output and f"{arguments.output}/{largest or 'any'}", say=print,
            **options,
        )
        for name, largest in (("DiffRate-M", None), ("DiffRate-M, 16x16 at most", Design().rows))
    }  # fmt: skip
    evit = PolicyModel(model, EViT.at(model, 3.0 / 2.9 * arguments.gmacs))
    models: dict[str, nn.Module] = {"whole": model, "EViT": evit, "DiffRate": diffrate.compress(model, start)}
    models |= {name: diffrate.compress(model, found.schedule) for name, found in joint.items()}
    rows: dict[str, dict[str, Any]] = {}
    for name, each in models.items():
        kept = list(each.kept) if isinstance(each, diffrate.CompressedModel) else None
        cost = default.price_of(None) if kept is None else default.price_of_kept(kept)
        if name in joint:
            cost = joint[name].cost
        rows[name] = {
            **cost,
            "ratios": [cost[m] / whole[m] for m in METRICS],
            "paper_ratios": [PAPER[name][1] / 68.1, PAPER[name][2] / 156],
            "design": asdict(joint[name].design if name in joint else Design()),
            "kept": kept,
        }
    if arguments.model == embedded.NAME or (arguments.checkpoint and arguments.data_dir):
        for name, found in accuracies(models, arguments, accelerator).items():
            rows[name].update(found)
    for name, row in rows.items():
        print(name, row, flush=True)
    by_macs, by_both = rows["DiffRate"], rows["DiffRate-M"]
    against_macs = {m: by_both[m] / by_macs[m] - 1 for m in ("gmacs", *METRICS)}
    print("joint search against MACs alone:", {m: f"{change:+.1%}" for m, change in against_macs.items()})
    results = {
        "model": arguments.model,
        "rows": rows,
        "targets": [ms, mw],
        "joint_against_macs": against_macs,
    }
    write_results(arguments.json, shlex.join(["python", *sys.argv]), results, accelerator.device)


def accuracies(
    models: dict[str, nn.Module], arguments: Any, accelerator: Accelerator
) -> dict[str, dict[str, float]]:
    device = accelerator.device
    dataset, split = (embedded.NAME, "test") if arguments.model == embedded.NAME else ("", "val")
    images = build_loader(
        models["whole"],
        arguments.data_dir,
        dataset,
        split,
        100,
        arguments.workers,
        crop_pct=1.0,
        device=device,
    )
    found = evaluate_in_turn(models, images, device, warm_up=False, progress=False)
    rows = {}
    for name, each in found.items():
        c = compare_evaluations(each, found["whole"])
        rows[name] = {
            "images": each.images, "top1": each.top1, "loss": each.loss, "top1_difference": c.top1_difference,
            "top1_standard_error": c.top1_standard_error, "loss_rise": c.loss_difference,
            "loss_standard_error": c.loss_standard_error,
        }  # fmt: skip
    return rows


if __name__ == "__main__":
    with ended_in_a_sentence():
        main()
