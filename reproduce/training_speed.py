"""How fast models train under published schedules, against the uncompressed model and the oracle slice of the same run.

The paper: 1.4 and 1.8 times as fast for DeiT-S at 2.9 and 2.3 G. A step is forward, backward and AdamW in bf16 mixed
precision, on random images that lie on the device; five of them in a row are timed, as in a training, which does not
wait for one step before it begins the next. First the kernels' gradients are checked against the plain path's. Rows are
timed in turns and saved after each case; a run that ends early keeps its rows. `compiled-graph` is what `finetune` and
`train` do with `--compile` on GPUs; `compiled`, without graphs, is there for comparison.

Cost: eager at all batch sizes about a minute on an H200; what is left of `--minutes` goes to the compiled models.

Measured here: results/training_speed_h200.json, DeiT-S, 256 images, compiled-graph: 1.45 times as fast at 2.9 GMACs and
1.81 times at 2.3.

    python reproduce/training_speed.py --json results/training_speed_h200.json --minutes 2.5
    python reproduce/training_speed.py --model vit_tiny_patch16_224 --budgets 0.8 --batch-sizes 2 --repeats 2   # a try
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from turns import Turns

from diffrate import kernels, published
from diffrate.devices import now, resolve_device
from diffrate.errors import DiffRateError
from diffrate.models import first_line, input_size, load_model
from diffrate.portions import out_of_memory
from diffrate.results import check_target, write_results
from diffrate.speed import WITH_KERNELS, Entrant, entrants

PAPER = {"deit_small_patch16_224": {"2.9": 1.4, "2.3": 1.8}}
WARM_UP = 3
IN_A_ROW = 5  # steps of one sample
COMPILERS = {"compiled": "default", "compiled-graph": "reduce-overhead"}  # mode: torch.compile's


class Trainee:
    """One entrant with its steps; all share the weights and the optimiser of one model."""

    def __init__(self, entrant: Entrant, path: str, mode: str, optimizer: torch.optim.Optimizer) -> None:
        self.entrant, self.path, self.mode, self.optimizer = entrant, path, mode, optimizer
        self.forward: Callable[[Tensor], Any] = entrant.model
        if mode in COMPILERS:
            self.forward = torch.compile(entrant.model, dynamic=False, mode=COMPILERS[mode])

    def step(self, images: Tensor, targets: Tensor) -> None:
        if self.mode == "compiled-graph":
            torch.compiler.cudagraph_mark_step_begin()
        half = torch.autocast(
            images.device.type, torch.bfloat16, enabled=images.is_cuda
        )  # CPUs are slow in it
        with kernels.using(self.path), half:
            loss = F.cross_entropy(self.forward(images), targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", default="deit_small_patch16_224")
    flags.add_argument("--budgets", default="2.9,2.3", help="published GMACs")
    flags.add_argument("--batch-sizes", default="256,1024,128")
    flags.add_argument("--modes", default="eager,compiled,compiled-graph")
    flags.add_argument("--repeats", type=int, default=10)
    flags.add_argument("--minutes", type=float, default=float("inf"))
    flags.add_argument(
        "--products",
        action="store_true",
        help="also the uncompressed model and the oracle slice with patches cut by a product, as ours are",
    )
    flags.add_argument("--profile", action="store_true", help="also the kernels of a step that take longest")
    flags.add_argument("--turns", default="", help="FOLDER,N: beside others, timed in turns; see turns.py")
    flags.add_argument("--device")
    flags.add_argument("--json", type=Path)
    arguments = flags.parse_args()
    try:
        run(arguments)
    except DiffRateError as error:
        sys.exit(f"Error: {error}")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    deadline = time.monotonic() + 60 * arguments.minutes
    turns = Turns(arguments.turns)
    check_target(arguments.json)
    device = resolve_device(arguments.device)
    model = load_model(arguments.model, model_kwargs={"drop_path_rate": 0.1}).to(device).train()
    budgets = [float(budget) for budget in arguments.budgets.split(",")]
    schedules = {f"{b:g}": published.for_model(model, arguments.model, b)[0] for b in budgets}
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-6, weight_decay=0.05, fused=device.type == "cuda")
    every = entrants(model, schedules, products=arguments.products)
    rows = [row for row in every if row.name != WITH_KERNELS]  # in training the two are the same
    for row in rows:
        row.model.train()
    results: dict[str, Any] = {
        "model": arguments.model,
        "precision": "bf16 autocast" if device.type == "cuda" else "fp32",
        "paper": PAPER,
        "rows": [],
    }
    results["gradients"] = gradients(model, rows)

    def save() -> None:
        if arguments.json is not None:
            write_results(arguments.json, shlex.join(["python", *sys.argv]), results, device)

    save()
    sizes = [int(size) for size in arguments.batch_sizes.split(",")]
    cases = [(mode, size) for mode in arguments.modes.split(",") for size in sizes]
    for mode, size in sorted(
        cases, key=lambda case: (case[0] != "eager", -case[1] if case[0] != "eager" else 0)
    ):
        if time.monotonic() > deadline:
            print("out of time: the rows so far are saved", flush=True)
            break
        try:
            measured, shown = measure(rows, optimizer, mode, size, arguments, deadline, turns)
            results["rows"] += measured
            if shown:
                results.setdefault("profile", {})[f"{mode} {size}"] = shown
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            if isinstance(error, RuntimeError) and not out_of_memory(error):
                raise
            results.setdefault("failed", {})[f"{mode} {size}"] = first_line(error)
            print(f"{mode} batch {size}: {first_line(error)}", flush=True)
        save()
    return results


def measure(
    rows: list[Entrant],
    optimizer: torch.optim.Optimizer,
    mode: str,
    size: int,
    arguments: argparse.Namespace,
    deadline: float,
    turns: Turns,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Milliseconds a step of every entrant, in turns, and with --profile where they go.

    Entrants that are not ready before the deadline are left out.
    """
    device = next(rows[0].model.parameters()).device
    images, targets = batch(rows[0].model, size, device)
    trainees = [Trainee(row, "auto", mode, optimizer) for row in rows]
    if mode == "eager" and device.type == "cuda":  # without kernels, for comparison
        trainees += [Trainee(row, "plain", mode, optimizer) for row in rows if row.oracle is not None]
    torch._dynamo.reset()
    ready: list[tuple[Trainee, float | None]] = []
    with torch._dynamo.config.patch(recompile_limit=8 * len(trainees)):
        for trainee in trainees:
            if ready and time.monotonic() > deadline:
                break
            with peak(device) as most:
                for _ in range(WARM_UP):
                    trainee.step(images, targets)
            ready.append((trainee, most[0]))
        seconds: dict[int, list[float]] = {i: [] for i in range(len(ready))}
        with turns.turn():
            # Once more for warmth: others may have been here in between.
            for repeat in range(-1, arguments.repeats):
                for i, (trainee, _) in enumerate(ready):
                    start = now(device)
                    for _ in range(IN_A_ROW):
                        trainee.step(images, targets)
                    if repeat >= 0:
                        seconds[i].append((now(device) - start) / IN_A_ROW)
            shown = {
                t.entrant.name: profiled(t, images, targets)
                for t, _ in ready
                if arguments.profile and t.path == "auto"
            }
    medians = [statistics.median(each) for each in seconds.values()]
    by_name = {t.entrant.name: m for (t, _), m in zip(ready, medians, strict=True) if t.path == "auto"}
    whole = rows[0].name
    found = []
    for (trainee, most), median in zip(ready, medians, strict=True):
        entrant = trainee.entrant
        row = {
            "name": entrant.name if trainee.path == "auto" else f"{entrant.name}, plain",
            "mode": mode, "batch_size": size, "gmacs": entrant.gmacs, "ms": 1000 * median,
            "images_per_second": size / median, "peak_gib": most,
            "of_uncompressed": by_name[whole] / median,
            "of_oracle": by_name[entrant.oracle] / median if entrant.oracle in by_name else None,
        }  # fmt: skip
        found.append(row)
        share = "" if row["of_oracle"] is None else f"  {row['of_oracle']:.2f} of the oracle slice"
        print(
            f"{mode:9s} batch {size:5d}  {row['name']:22s} {row['ms']:8.1f} ms  {row['images_per_second']:9,.0f} "
            f"images/s  {row['of_uncompressed']:.2f}x{share}",
            flush=True,
        )
    return found, shown


def batch(model: nn.Module, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random images, and targets as soft as mixing makes them."""
    images = torch.randn(size, 3, *input_size(model), device=device)
    return images, torch.rand(size, int(model.num_classes), device=device).softmax(-1)  # type: ignore[arg-type]


@contextmanager
def peak(device: torch.device) -> Iterator[list[float | None]]:
    """The most memory that was in use within, in GiB, where the device tells."""
    most: list[float | None] = [None]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield most
    if device.type == "cuda":
        most[0] = torch.cuda.max_memory_allocated(device) / 2**30


def gradients(model: nn.Module, rows: list[Entrant]) -> dict[str, float]:
    """For each schedule how far the gradients of the kernels are from the plain path's, relative to their length.

    In fp32 and without dropped branches, where both must make the same choices.
    """
    device = next(model.parameters()).device
    images, targets = batch(model, 4, device)
    far = {}
    for row in rows:
        if row.oracle is None:
            continue
        found = []
        row.model.eval()
        for path in ("auto", "plain"):
            model.zero_grad(set_to_none=True)
            with kernels.using(path):
                F.cross_entropy(row.model(images), targets).backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        row.model.train()
        model.zero_grad(set_to_none=True)
        far[row.name] = float((found[0] - found[1]).norm() / found[1].norm())
        print(f"gradients at {row.name} G: {far[row.name]:.1e} from the plain path", flush=True)
    return far


def profiled(trainee: Trainee, images: Tensor, targets: Tensor) -> dict[str, Any]:
    """Milliseconds of a step in the kernels that take longest."""
    on_gpu = images.is_cuda
    watched = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=watched) as profiler:
        trainee.step(images, targets)
        now(images.device)
    times = {
        event.key[:100]: (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000
        for event in profiler.key_averages()
    }
    longest = sorted(times.items(), key=lambda item: -item[1])[:30]
    return {"total": sum(times.values()), "longest": dict(longest)}


if __name__ == "__main__":
    main()
