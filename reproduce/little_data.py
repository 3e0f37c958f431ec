"""Search on 1,000 images, three seeds a budget, and what each schedule costs in accuracy on held-out validation images.

Paper: 1,000 images are nearly as good as all (81.4 and 81.5, DeiT-B at 11.5 GMACs). Needs a folder with `search/` and
`val/` splits and a checkpoint.

Cost: nine searches, of 51 to 61 s on an H200 with six side by side, and a pass over the images for each.

Measured here: results/search_vit_tiny_h200.json, ViT-Ti: the loss rises by 0.008 to 0.009 at 0.81 GMACs and by 0.035
to 0.038 at 0.655. The paper's recipe at 0.81, once, by small steps on a CPU: 0.111,
results/search_vit_tiny_paper_cpu.json.

    python reproduce/little_data.py --model vit_tiny_patch16_224 --checkpoint vit_tiny_patch16_224.safetensors \\
        --data-dir imagenet --budgets 1.0,0.81,0.655 --seeds 3 --json results/search_vit_tiny_h200.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from timm.data import Mixup
from torch import Tensor

import diffrate
from diffrate import published
from diffrate.data import build_loader, search_datasets
from diffrate.evaluate import evaluate
from diffrate.models import load_model
from diffrate.operator import Operator
from diffrate.results import write_results
from diffrate.searching.fast import OPERATOR


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--val-dir", help="folder with the val split, if it is elsewhere")
    parser.add_argument("--budgets", default="1.0,0.81,0.655", help="GMACs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="to share the seeds out among processes")
    parser.add_argument("--published", default="1.0,0.8,0.6", help="published schedules to borrow")
    parser.add_argument("--paper-budgets", default="", help="also run the paper's recipe at these GMACs")
    parser.add_argument("--paper-steps", type=int, help="steps of the paper's recipe")
    parser.add_argument("--paper-batch-size", type=int, help="images a step of the paper's recipe")
    parser.add_argument(
        "--by-rank", default="", help="also the fast recipe with the paper's choice of tokens, at these"
    )
    parser.add_argument("--no-front", action="store_true", help="leave out the one search over all budgets")
    parser.add_argument("--steps", type=int, help="steps of the fast recipe")
    parser.add_argument("--batch-size", type=int, help="images a step of the fast recipe")
    parser.add_argument("--image-share", type=float, help="of the fast recipe's operator")
    parser.add_argument("--memory", type=float, help="of the fast recipe's operator")
    parser.add_argument("--crop-pct", type=float, default=1.0, help="of the validation images")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()

    accelerator = Accelerator(mixed_precision="fp16" if torch.cuda.is_available() else "no")
    model = load_model(arguments.model, arguments.checkpoint).to(accelerator.device).eval()
    images = val_images(model, arguments, accelerator.device)
    whole = evaluate(model, images, accelerator.device)
    print(
        f"uncompressed: top-1 {whole.top1:.2f}, loss {whole.loss:.4f}, {diffrate.gmacs(model):.4f} GMACs",
        flush=True,
    )
    rows: list[dict[str, Any]] = []

    def measure(name: str, schedule: diffrate.Schedule, **more: Any) -> None:
        compressed = diffrate.compress(model, schedule)
        c = evaluate(compressed, images, accelerator.device, compare=model).comparison
        assert c is not None
        row = {
            "name": name,
            "gmacs": diffrate.gmacs(compressed),
            "top1_difference": c.top1_difference,
            "loss_rise": c.loss_difference,
            "loss_standard_error": c.loss_standard_error,
            "changed": c.changed,
            "prune": list(schedule.prune),
            "merge": list(schedule.merge),
            "operator": vars(compressed.operator),
            **more,
        }
        rows.append(row)
        results = {
            "uncompressed": {"top1": whole.top1, "loss": whole.loss, "images": whole.images},
            "rows": rows,
        }
        write_results(arguments.json, shlex.join(["python", *sys.argv]), results, accelerator.device)
        print(
            f"{name:34s} {row['gmacs']:.4f} G  top-1 {c.top1_difference:+.2f}  loss {c.loss_difference:+.4f}"
            f" ± {c.loss_standard_error:.4f}  {more.get('seconds', 0):.1f} s  {list(schedule.merge)}",
            flush=True,
        )

    for gmacs in floats(arguments.published):
        measure(f"borrowed {gmacs:g}", published.for_model(model, arguments.model, gmacs)[0])
    light = search_datasets(model, arguments.data_dir, split="search")
    common: dict[str, Any] = {
        "accelerator": accelerator,
        "workers": arguments.workers,
        "name": arguments.model,
    }
    operator = OPERATOR.changed(image_share=arguments.image_share, memory=arguments.memory)
    fast = {**common, "steps": arguments.steps, "batch_size": arguments.batch_size}
    if operator != OPERATOR:  # a default that is given leaves nothing to held-out images
        fast["operator"] = operator
    for budget in floats(arguments.budgets):
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            found = diffrate.search(model, light, budget, seed=seed, **fast)
            measure(
                f"fast {budget:g} seed {seed}",
                found.schedule,
                seconds=found.seconds,
                budget=budget,
                seed=seed,
            )
    front = ",".join(f"{budget:g}G" for budget in floats(arguments.budgets))
    if not arguments.no_front:
        found = diffrate.search(model, light, front, **fast)
        for schedule in found.schedules:
            measure(f"one search, {schedule.made['budget_gmacs']:g}", schedule, seconds=found.seconds)
    for budget in floats(arguments.by_rank):
        by_rank = Operator(operation="merge", mean="attention")
        found = diffrate.search(model, light, budget, **{**fast, "operator": by_rank})
        measure(f"fast {budget:g}, choice by rank", found.schedule, seconds=found.seconds)
    if arguments.paper_budgets:
        heavy = search_datasets(model, arguments.data_dir, split="search", labels=True, heavy=True)
        mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=model.num_classes)
        for budget in floats(arguments.paper_budgets):
            found = diffrate.search(
                model, heavy, budget, recipe="paper", mix=mixup, steps=arguments.paper_steps,
                batch_size=arguments.paper_batch_size, **common,
            )  # fmt: skip
            measure(f"paper's recipe {budget:g}", found.schedule, seconds=found.seconds, budget=budget)


def val_images(
    model: Any, arguments: argparse.Namespace, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """The validation images, read once."""
    folder = arguments.val_dir or arguments.data_dir
    loader = build_loader(
        model,
        folder,
        split="val",
        batch_size=250,
        workers=arguments.workers,
        crop_pct=arguments.crop_pct,
        device=device,
    )
    return [(images, labels) for images, labels in loader]


def floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


if __name__ == "__main__":
    main()
