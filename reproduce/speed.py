"""How fast the published schedules are on a GPU, against the uncompressed model and the oracle slice of the same run.

Paper: its published code is slower on an H200 than the uncompressed model under SDPA. First every kernel is checked
against its plain twin in fp64, then attention is timed by itself, then whole models. Random weights: speed does not
depend on them. Rows are written as they come; a run that ends early keeps its rows, and `--resume` skips those.

    python reproduce/speed.py --json results/speed_h200.json                    # checks, then all cases
    python reproduce/speed.py --json results/speed_h200.json --only deit_base --minutes 8
    python reproduce/speed.py --only checks                                      # also: kernels

Compiling takes most of the time; `--turns` has several of these compile side by side, one after the other timed.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from turns import Turns

from diffrate import kernels, published
from diffrate.backbones.base import Attention
from diffrate.devices import now, resolve_device
from diffrate.kernels import ops
from diffrate.kernels.patches import project
from diffrate.mixing import mix
from diffrate.models import load_model
from diffrate.operator import Operator
from diffrate.ranking import class_attention_row
from diffrate.reduction import reduce_tokens
from diffrate.results import write_results
from diffrate.searching.fast import OPERATOR
from diffrate.speed import DTYPES, bench, profile
from diffrate.tokens import Tokens

MEAN_POOLED = {"global_pool": "avg"}  # the paper's ViT-L and ViT-H are MAE's


@dataclass(frozen=True)
class Case:
    """One model with its budgets, in some modes, at one batch size."""

    model: str
    budgets: tuple[float, ...]
    batch: int
    modes: tuple[str, ...]
    kernels: str = "auto"
    products: bool = False  # also the baselines with patches by a product

    def name(self, dtype: str) -> str:
        return f"{self.model} batch {self.batch} {dtype} {'+'.join(self.modes)} {self.kernels}"


CASES = (
    Case("deit_base_patch16_224", (8.7, 11.5), 1024, ("eager", "compiled"), products=True),
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
        repeats=arguments.repeats, path=case.kernels, products=case.products, gate=arguments.turn,
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


def checks(device: torch.device, dtypes: list[torch.dtype]) -> Iterator[str]:
    """Every kernel against its plain twin in fp64; an AssertionError where one is off."""
    kernels.INTERPRETED = device.type != "cuda"
    shapes = [(8, 3, 197, 64, 192), (8, 12, 158, 64, 768), (4, 16, 257, 80, 1280), (1, 6, 97, 64, 384)]
    if device.type != "cuda":
        shapes = [(1, 2, 21, 16, 32)]  # in Triton's interpreter
    for dtype in [*dtypes, torch.float32]:
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-5}[dtype]
        for b, heads, n, d, c in shapes:
            torch.manual_seed(0)
            qkv = torch.randn(b, n, 3, heads, d, device=device).to(dtype).permute(2, 0, 3, 1, 4)
            q, k, v = (1.5 * qkv).unbind(0)
            x = torch.randn(b, n, c, device=device).to(dtype)
            for size in (None, 1 + 9 * torch.rand(b, n, device=device)):
                bias = None if size is None else size.double().log()
                mask = None if bias is None else bias[:, None, None]
                wide = [t.double() for t in (q, k, v)]
                wanted = F.scaled_dot_product_attention(*wide, attn_mask=mask, scale=d**-0.5)
                mixed = mix(Attention(q, k, v, d**-0.5, 0.0), None if size is None else size.log())
                few, few_logits = torch.ops.diffrate.attend(q, k, v, size, d**-0.5, True)
                logits = torch.ops.diffrate.query_logits(q, k, size, d**-0.5, 1, 0)
                row = class_attention_row(wide[0], wide[1], d**-0.5, bias)
                importance, order = ops.rank(logits, 1, 0.0)
                errors = {
                    "mix": error(mixed, wanted) / 8,  # values reach from -6 to 6, and the bias is rounded
                    "attend": error(few, wanted) / 8,
                    "attend's row": error(
                        (few_logits.double() * 0.6931471805599453).softmax(-1)[:, :, 0], row.double()
                    ),
                    "row": error((logits.double() * 0.6931471805599453).softmax(-1)[:, :, 0], row.double()),
                    "importance": error(importance, row.mean(1).double()),
                }
                if size is not None:
                    *wide_pair, wide_logits = torch.ops.diffrate.widen(q, k, size, d**-0.5, True)
                    wide_mixed = F.scaled_dot_product_attention(*wide_pair, v, scale=d**-0.5)
                    errors["wide"] = error(wide_mixed, wanted) / 8
                    errors["wide row"] = error(wide_logits, logits.double()) / 8
                if size is not None and n <= ops.MOST_KEYS and d <= 64:
                    learned, learned_logits, log_sum = torch.ops.diffrate.attend_training(
                        q, k, v, size, d**-0.5, True
                    )
                    errors["in training"] = error(learned, wanted) / 8
                    errors["in training, row"] = error(learned_logits, logits.double()) / 8
                    errors["in training, gradient"] = gradient_error(q, k, v, size, learned, log_sum) / 8
                assert all(e < tolerance for e in errors.values()), (dtype, b, heads, n, d, errors)
                sorted_by = importance[:, 1:].argsort(dim=-1, descending=True, stable=True) + 1
                assert torch.equal(order[:, 1:].long(), sorted_by), "order"
                for operator in (
                    Operator(),
                    Operator(operation="merge", mean="attention", choice="cost"),
                    Operator(operation="merge", mean="attention", choice="cost", keep_norm=True),
                    Operator(operation="merge", mean="size"),
                    Operator(operation="prune"),
                ):
                    name = f"{operator.operation}/{operator.choice}/{operator.mean}/{operator.keep_norm}"
                    errors[name] = reduction_error(x, logits, importance, size, operator, tolerance)
                norm = torch.nn.LayerNorm(c, device=device, dtype=dtype)
                total, normed = ops.add_norm(x, x.flip(0), norm.weight.data, norm.bias.data, norm.eps)
                assert torch.equal(total, x + x.flip(0)), "sum"
                errors["norm of a sum"] = error(normed, norm(total).double())
                assert errors["norm of a sum"] < 4 * tolerance, errors
                shown = "  ".join(f"{key} {value:.1e}" for key, value in errors.items())
                yield f"ok {str(dtype)[6:]} {(b, heads, n, d, c)} sizes={size is not None}: {shown}"
    kernels.INTERPRETED = False


def reduction_error(
    x: Tensor, logits: Tensor, importance: Tensor, size: Tensor | None, operator: Operator, tolerance: float
) -> float:
    n = x.shape[1]
    prune, merge = n - n // 10, n - n // 5
    norm = torch.nn.LayerNorm(x.shape[2], device=x.device, dtype=x.dtype)
    with torch.no_grad():
        ranked = kernels.rank(logits, 1, operator)
        ours, normed = kernels.reduce_tokens(Tokens(x, 1, size), ranked, prune, merge, operator, norm)
        assert normed is not None
        assert error(normed, norm(ours.x).double()) < 4 * tolerance, "norm"
    wanted = reduce_tokens(Tokens(x.double(), 1, size), importance[:, 1:], prune, merge, operator)
    off = (ours.x.double() - wanted.x).abs().amax(dim=-1)
    # Two targets may be equally similar to the last bit of fp32: then another one is as right.
    assert (off < 4 * tolerance).double().mean() > 0.995, (operator, off.max())
    if wanted.size is not None:
        assert ours.size is not None
        assert ((ours.size - wanted.size).abs() < 1e-3).double().mean() > 0.995, operator
    return off.median().item()


def gradient_error(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor | None, mixed: Tensor, log_sum: Tensor
) -> float:
    """Of attend_back, at a gradient as large as the values."""
    scale, gradient = q.shape[-1] ** -0.5, v.flip(0)
    found = ops.attend_back(gradient, q, k, v, size, scale, mixed, log_sum)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    mask = None if size is None else size.double().log()[:, None, None]
    wanted = F.scaled_dot_product_attention(*exact, attn_mask=mask, scale=scale)
    theirs = torch.autograd.grad(wanted, exact, gradient.double())
    return max(error(a, b) / max(b.abs().max().item(), 1.0) for a, b in zip(found, theirs, strict=True))


def error(ours: Tensor, wanted: Tensor) -> float:
    return (ours.double() - wanted).abs().max().item()


# --- where does it go? --------------------------------------------------------------------------------------------


def kernel_times(device: torch.device, batch: int) -> Iterator[dict[str, Any]]:
    """Attention of several kinds and the parts of a reduction, by themselves, in milliseconds."""
    for b, heads, n, d in (
        (batch, 12, 197, 64),
        (batch, 12, 145, 64),
        (batch, 12, 94, 64),
        (batch // 4, 16, 240, 80),
        (1, 12, 170, 64),
        (4, 12, 170, 64),
        (16, 12, 170, 64),
    ):
        qkv = torch.randn(b, n, 3, heads, d, device=device, dtype=torch.float16).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        size = 1 + 3 * torch.rand(b, n, device=device)
        bias, scale = size.log(), d**-0.5
        attention = Attention(q, k, v, scale, 0.0)
        kinds: dict[str, Callable[[], Any]] = {
            "sdpa": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v),
            "sdpa + bias": lambda a=attention, b=bias: mix(a, b),
            "widen": lambda q=q, k=k, s=size, c=scale: ops.widen(q, k, s, c, False),
            "widen, with the class row, and sdpa": lambda a=attention, s=size: kernels._mix_wide(a, s, True),
            "query_logits, class": lambda q=q, k=k, s=size, c=scale: ops.query_logits(q, k, s, c, 1, 0),
            "query_logits, 15 more": lambda q=q, k=k, s=size, c=scale: ops.query_logits(q, k, s, c, 1, 15),
            "attend, with that row": lambda q=q, k=k, v=v, s=size, c=scale: ops.attend(q, k, v, s, c, True),
        }
        for name, call in kinds.items():
            yield {"shape": [b, heads, n, d], "kernel": name, "ms": milliseconds(call, device)}
    yield from attention_in_training(device, batch // 4)
    for c in (192, 384, 768, 1024):
        images = torch.randn(batch, 3, 224, 224, device=device, dtype=torch.float16)
        weight = torch.randn(c, 3, 16, 16, device=device, dtype=torch.float16)
        ways: dict[str, Callable[[], Any]] = {
            "patches by convolution": lambda i=images, w=weight: (
                F.conv2d(i, w, stride=16).flatten(2).transpose(1, 2)
            ),
            "patches by product": lambda i=images, w=weight: project(i, w, None).flatten(2).transpose(1, 2),
        }
        for name, call in ways.items():
            yield {"shape": [batch, 3, 224, c], "kernel": name, "ms": milliseconds(call, device)}
    for b, heads, n, c in ((batch, 12, 170, 768), (batch, 3, 170, 192), (1, 12, 170, 768)):
        x = torch.randn(b, n, c, device=device, dtype=torch.float16)
        logits = torch.randn(b, heads, 1, n, device=device)
        more = torch.randn(b, heads, 16, n, device=device)
        size = 1 + 3 * torch.rand(b, n, device=device)
        importance, order = ops.rank(logits, 1, 0.0)
        affine = [torch.ones(c, device=device, dtype=torch.float16)] * 2
        prune, keep, full = n - 10, n - 20, x.float()
        tokens = Tokens(full, 1, size)
        parts: dict[str, Callable[[], Any]] = {
            "rank": lambda logits=logits: ops.rank(logits, 1, 0.0),
            "rank, 15 more": lambda logits=more: ops.rank(logits, 1, 0.2),
            "match": lambda x=x, o=order, k=keep: ops.match(x, o, 1, k, 10),
            "reduce (match, assemble)": lambda x=x, i=importance, o=order, s=size, p=prune, k=keep: (
                ops.reduce(x, i, o, s, 1, p, k, "plain", False, 0.0, False)
            ),
            "reduce and norm": lambda x=x, i=importance, o=order, s=size, p=prune, k=keep, w=affine: (
                ops.reduce(x, i, o, s, 1, p, k, "plain", False, 0.0, False, *w, 1e-6)
            ),
            "reduce, merge by cost": lambda x=x, i=importance, o=order, s=size, n=n, k=keep: ops.reduce(
                x, i, o, s, 1, n, k, "attention", True, 0.0, False
            ),
            "reduce, merge by cost, norms kept": lambda x=x, i=importance, o=order, s=size, n=n, k=keep: (
                ops.reduce(x, i, o, s, 1, n, k, "attention", True, 0.0, True)
            ),
            "reduce, merge by cost, norms kept, fp32": lambda x=full, i=importance, o=order, s=size, n=n, k=keep: (
                ops.reduce(x, i, o, s, 1, n, k, "attention", True, 0.0, True)
            ),
            "reduce, merge by cost, norms kept, fp32, plain": lambda t=tokens, i=importance, n=n, k=keep: (
                reduce_tokens(t, i[:, 1:], n, k, OPERATOR)
            ),
            "copy of what is kept": lambda x=x, k=keep: x[:, :k].contiguous(),
        }
        for name, call in parts.items():
            yield {"shape": [b, n, c], "kernel": name, "ms": milliseconds(call, device)}


def attention_in_training(device: torch.device, batch: int) -> Iterator[dict[str, Any]]:
    """Forward and backward of attention, with the sizes of tokens and without, in milliseconds."""
    heads, d = 6, 64
    for n in (197, 156, 127, 98, 66, 37):
        shape = (batch, n, 3, heads, d)
        q, k, v = torch.randn(shape, device=device, dtype=torch.bfloat16).permute(2, 0, 3, 1, 4).unbind(0)
        learning = [t.detach().requires_grad_() for t in (q, k, v)]
        size = 1 + 3 * torch.rand(batch, n, device=device)
        log_size = F.pad(size.log().to(q.dtype), (0, -n % 8))[:, :n]
        attention = Attention(*learning, d**-0.5, 0.0)
        ways: dict[str, Callable[[], Tensor]] = {
            "sdpa": lambda a=attention: mix(a, None),
            "sdpa + bias": lambda a=attention, s=log_size: mix(a, s),
            "our kernel": lambda a=attention, s=size: kernels._attend_training(a, s, True)[0],
        }
        for name, forward in ways.items():
            taken = milliseconds(functools.partial(backward, forward, learning), device)
            yield {"shape": [batch, heads, n, d], "kernel": f"{name}, forward and backward", "ms": taken}


def backward(forward: Callable[[], Tensor], inputs: list[Tensor]) -> Any:
    out = forward()
    return torch.autograd.grad(out, inputs, torch.ones_like(out))


def milliseconds(call: Callable[[], Any], device: torch.device) -> float | str:
    """Median over samples of ten calls, without the time to launch them: they are recorded as a graph."""
    try:
        for _ in range(3):
            call()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph):
            for _ in range(10):
                call()
    except Exception as failure:  # tiles that do not fit the chip are no reason to stop
        return f"failed: {str(failure).splitlines()[0][:60]}"
    samples = []
    for _ in range(7):
        started = now(device)
        graph.replay()
        samples.append((now(device) - started) / 10)
    return round(1000 * statistics.median(samples), 4)


# --- what came out ------------------------------------------------------------------------------------------------


def show(rows: list[dict[str, Any]], title: str) -> None:
    print(title)
    print(table(rows), flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'model':24s}{'row':26s}{'mode':15s}{'dtype':9s}{'batch':>6s}{'images/s':>10s}{'ms':>9s}"
             f"{'±':>7s}{'x whole':>9s}{'x oracle':>9s}{'saved':>7s}"]  # fmt: skip
    for r in rows:
        oracle = "" if r["of_oracle"] is None else f"{r['of_oracle']:.3f}"
        kind = "" if r.get("kernels", "auto") == "auto" else f" {r['kernels']}"
        saved = "" if r["saved_share"] is None else f"{r['saved_share']:.0%}"
        lines.append(
            f"{r.get('model', '')[:23]:24s}{r['name'] + kind:26s}"
            f"{r['mode']:15s}{r['dtype']:9s}{r['batch_size']:6d}{r['images_per_second']:10.0f}{r['ms']:9.3f}"
            f"{r['spread_ms']:7.3f}{r['of_uncompressed']:9.3f}{oracle:>9s}{saved:>7s}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
