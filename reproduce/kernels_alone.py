"""Every kernel by itself: checked against its plain twin in fp64, and timed. What `speed.py` begins with.

python reproduce/speed.py --only checks --dtypes float16,bfloat16
python reproduce/speed.py --only kernels --no-profile --json results/kernels_h200.json
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from diffrate import kernels
from diffrate.backbones.base import Attention
from diffrate.compressed import with_kernels
from diffrate.devices import now
from diffrate.kernels import ops
from diffrate.kernels.patches import project
from diffrate.mixing import mix
from diffrate.operator import Operator
from diffrate.ranking import class_attention_row
from diffrate.reduction import reduce_tokens
from diffrate.searching.fast import OPERATOR
from diffrate.tokens import Tokens


def checks(device: torch.device, dtypes: list[torch.dtype]) -> Iterator[str]:
    """Every kernel against its plain twin in fp64; an AssertionError where one is off."""
    kernels.INTERPRETED = device.type != "cuda"
    shapes = [
        (8, 3, 197, 64, 192),
        (8, 12, 158, 64, 768),
        (4, 16, 257, 80, 1280),
        (1, 6, 97, 64, 384),
        (2, 3, 128, 48, 192),
        (3, 2, 64, 64, 96),
    ]
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
        yield from whole_models(device, dtype)
    kernels.INTERPRETED = False


@torch.no_grad()
def whole_models(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Uncompressed models with all kernels, which must be about as near to themselves in fp64 as they are without."""
    names, least = ("vit_tiny_patch16_224", "vit_base_patch16_224", "vit_large_patch16_224"), {}
    if device.type != "cuda":
        names, least = names[:1], {"img_size": 64, "depth": 2}
    for name in names:
        torch.manual_seed(0)
        model = timm.create_model(name, **least).eval().to(device)
        images = torch.randn(8, 3, *model.patch_embed.img_size, device=device)
        wanted = copy.deepcopy(model).double()(images.double())
        model, images = model.to(dtype), images.to(dtype)
        own, ours = (
            ((made(images).double() - wanted).norm() / wanted.norm()).item()
            for made in (model, with_kernels(model))
        )
        assert ours < 1.5 * own + 1e-6, (name, dtype, own, ours)
        yield f"ok {str(dtype)[6:]} {name}: off by {ours:.1e} with kernels, {own:.1e} without"


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
        prune, keep, full, length = n - 10, n - 20, x.float(), ops.lengths(x)
        tokens = Tokens(full, 1, size)

        def reduce(
            x: Tensor, p: int, *how: Any, given: Any = (importance, order, size, length), k: int = keep
        ) -> Any:
            return ops.reduce(x, *given, 1, p, k, *how)

        parts: dict[str, Callable[[], Any]] = {
            "rank": lambda logits=logits: ops.rank(logits, 1, 0.0),
            "rank, 15 more": lambda logits=more: ops.rank(logits, 1, 0.2),
            "sum": lambda x=x: x + x,
            "sum, measured": lambda x=x: ops.add_measured(x, x),
            "match": lambda x=x, o=order, m=length, k=keep: ops.match(x, o, m, 1, k, 10),
            "reduce (match, assemble)": lambda r=reduce, x=x, p=prune: r(x, p, "plain", False, 0.0, False),
            "reduce and norm": lambda r=reduce, x=x, p=prune, w=affine: r(
                x, p, "plain", False, 0.0, False, *w, 1e-6
            ),
            "reduce, merge by cost": lambda r=reduce, x=x, n=n: r(x, n, "attention", True, 0.0, False),
            "reduce, merge by cost, norms kept": lambda r=reduce, x=x, n=n: r(
                x, n, "attention", True, 0.0, True
            ),
            "reduce, merge by cost, norms kept, fp32": lambda r=reduce, x=full, n=n: r(
                x, n, "attention", True, 0.0, True
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
