"""Extreme numbers: where a model gives finite logits, so does the compressed one, and fast paths equal their twins."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import diffrate
from backbones.test_multihead import torchvision_model
from backbones.test_timm_metaformer import build as small_caformer
from backbones.test_timm_relpos import build as small_beit
from conftest import random_vit
from diffrate import kernels, ranking
from diffrate.backbones import backbone_of
from diffrate.masking import Masked, masked_logits, reduce_masked
from diffrate.operator import Operator
from diffrate.proxy import Kept
from diffrate.reduction import reduce_tokens
from diffrate.tokens import Tokens

HALF = (torch.float16, torch.bfloat16)
OPERATORS = [
    {},
    {"operation": "merge", "mean": "attention", "choice": "cost", "floor": 0.5},
    {"operation": "merge", "mean": "attention", "choice": "cost", "keep_norm": True},
    {"operation": "merge", "mean": "size"},
    {"operation": "merge-prune", "mean": "attention"},
]
MODELS: dict[str, Callable[[], nn.Module]] = {
    "class token": lambda: random_vit(patch_size=8),
    "registers, class attention by value": lambda: random_vit(patch_size=8, reg_tokens=2, qk_norm=True),
    "mean of image tokens": lambda: random_vit(patch_size=8, class_token=False, global_pool="avg"),
    "rotary": lambda: timm.create_model(
        "eva02_tiny_patch14_224", img_size=56, depth=4, embed_dim=32, num_heads=2, num_classes=3
    ),
    "relative positions": lambda: small_beit("beit_base_patch16_224"),
    "torchvision": torchvision_model,
    "restored grid": small_caformer,
}


def shrinking(model: nn.Module) -> diffrate.Schedule:
    layout = backbone_of(model).layout
    n, p, depth = layout.tokens, layout.prefix, layout.depth
    merge = [n, *(p + max(1, (n - p) * (depth - i) // (depth + 1)) for i in range(1, depth))]
    if not layout.compresses_last_block:
        merge[-1] = merge[-2]
    prune = [n, *((before + after + 1) // 2 for before, after in itertools.pairwise(merge))]
    return diffrate.Schedule(merge[:1] + merge[:-1] if layout.restores else prune, merge, prefix=p)


def steepened(model: nn.Module, length: float = 500.0) -> nn.Module:
    """Queries and keys so long that products of two of them are beyond fp16, which torch's attention bears."""
    for name, parameter in model.named_parameters():
        if name.endswith(("qkv.weight", "in_proj_weight")):
            both = parameter.data[: 2 * len(parameter) // 3]
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            both = parameter.data
        else:
            continue
        both.mul_(length / both.norm(dim=1).mean())
    return model


def without_positions(model: nn.Module) -> nn.Module:
    """Patches that look alike are alike: no position is added to them."""
    for name, parameter in model.named_parameters():
        if "pos" in name or "relative" in name:
            parameter.data.zero_()
    return model


def extreme_inputs(size: tuple[int, int], patch: int = 8) -> dict[str, Tensor]:
    """Images whose tokens are all equal, each other's opposite, or of lengths a hundred thousand times apart."""
    noise = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    rows, columns = (torch.arange(side) // patch for side in size)
    board = torch.where((rows[:, None] + columns) % 2 == 0, 1.0, -1.0)
    return {
        "noise": noise,
        "black": torch.zeros(2, 3, *size),
        "opposite": board.expand(2, 3, -1, -1).contiguous(),
        "a few bright patches": torch.where(noise.amax(1, keepdim=True) > 3, 3e3, 1e-2) * noise,
    }


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_no_model_gains_a_nan(kind: str, dtype: torch.dtype) -> None:
    for change in (lambda m: m, without_positions, steepened):
        torch.manual_seed(0)
        model = change(MODELS[kind]().eval()).to(dtype)
        layout = backbone_of(model).layout
        for changes in OPERATORS[1:3] if layout.restores else OPERATORS[: 5 if kind == "class token" else 3]:
            fast = diffrate.compress(model, shrinking(model), **changes)
            for name, images in extreme_inputs(layout.img_size).items():
                with torch.inference_mode():
                    whole, (logits, tokens) = (
                        model(images.to(dtype)),
                        fast(images.to(dtype), return_tokens=True),
                    )
                if whole.isfinite().all():
                    assert logits.isfinite().all(), (name, changes)
                    assert tokens.sizes().isfinite().all(), (name, changes)
                    assert tokens.sizes().min() >= 1, (name, changes)
                else:  # the model's own overflow, which fp16 alone may have
                    assert dtype == torch.float16


def test_the_models_above_reach_products_that_fp16_does_not_hold() -> None:
    model = steepened(random_vit(patch_size=8)).half()
    backbone = backbone_of(model)
    tokens = backbone.start(extreme_inputs((32, 32))["noise"].half())
    attention = backbone.open_attention(0, tokens.x, tokens.positions)
    assert not (attention.q @ attention.k.transpose(-2, -1)).isfinite().all()
    assert ranking.class_attention(*attention[:2], attention.scale, None, 1).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("length", [1e2, 1e4, 1e6])
def test_importances_of_long_queries_and_keys_are_those_of_fp64(dtype: torch.dtype, length: float) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, 9, 64, generator=generator) for _ in range(2))
    q, k = ((length / 64) ** 0.5 * t.to(dtype) for t in (q, k))
    size = torch.linspace(1, 4000, 18).reshape(2, 9)
    weights = ranking.attention_weights(q, k, 0.125, size.log())
    assert weights.isfinite().all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 9))
    torch.testing.assert_close(
        ranking.class_attention(q, k, 0.125, size.log(), 1), weights[:, :, 0].mean(1)[:, 1:]
    )
    logits = q.double() @ k.double().transpose(-2, -1) * 0.125
    exact = (logits + size.log().double()[:, None, None]).softmax(-1)
    within = logits.abs().amax(-1) * {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    clear = exact.topk(2).values.log().diff(dim=-1).abs().squeeze(-1) > 2 * within
    assert (weights.argmax(-1) == exact.argmax(-1))[clear].all()


@pytest.mark.parametrize("length", [1e-30, 1e-12, 1.0, 1e12, 1e19, 3e38])
def test_features_of_any_length(length: float) -> None:
    x = length * torch.randn(2, 30, 8, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    importance = torch.rand(2, 29, generator=torch.Generator().manual_seed(1))
    for changes in OPERATORS:
        reduced = reduce_tokens(Tokens(x, 1), importance, 25, 12, Operator(**changes))
        assert reduced.x.isfinite().all()
        assert reduced.sizes().isfinite().all()
        assert reduced.sizes().min() >= 1


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("tokens", [300, 4097])
def test_a_token_of_thousands_is_their_mean(dtype: torch.dtype, tokens: int) -> None:
    """All image tokens join the first: the mean, against fp64, is as good as its type, and so is its size."""
    generator = torch.Generator().manual_seed(0)
    x = (3 + torch.rand(2, tokens, 8, generator=generator)).to(dtype)
    importance = torch.linspace(1, 0.5, tokens - 1).expand(2, -1)
    reduced = reduce_tokens(Tokens(x, 1), importance, tokens, 2, Operator(operation="merge"))
    rounding = torch.finfo(dtype).eps
    mean = x[:, 1:].double().mean(1)
    assert ((reduced.x[:, 1].double() - mean).abs() / mean).max() < max(rounding, 3e-6)
    joined, target = x[:, 2:].double(), x[:, 1:2].double()
    size = 1 + torch.cosine_similarity(joined, target, dim=-1).sum(-1)
    torch.testing.assert_close(reduced.size[:, 1].double(), size, rtol=1e-5, atol=0)
    assert size.min() > 0.95 * tokens
    # Once more, with sizes of thousands: attention sees their logarithms.
    assert reduced.key_bias().isfinite().all()
    again = reduce_tokens(reduced, importance[:, :1], 2, 2, Operator())
    assert torch.equal(again.size, reduced.size)


def test_a_model_of_a_thousand_patches_merged_into_two() -> None:
    model = random_vit(img_size=256, patch_size=8, embed_dim=16, depth=3)
    schedule = diffrate.Schedule((1025, 1025, 3), (1025, 3, 3))
    images = torch.randn(1, 3, 256, 256, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, *HALF):
        fast = diffrate.compress(copy.deepcopy(model).to(dtype), schedule, operation="merge")
        with torch.inference_mode():
            logits, tokens = fast(images.to(dtype), return_tokens=True)
        assert logits.isfinite().all()
        members = torch.bincount(tokens.patches[0], minlength=3)
        assert members[0] == 0
        assert members.sum() == 1024
        assert members.max() > 300
        assert (tokens.size[0] <= members.clamp_min(1) + 0.1).all()


def against(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens of which the less important half points away from every one of the other half."""
    generator = torch.Generator().manual_seed(n)
    x = 0.2 * torch.randn(2, n, 32, generator=generator)
    x[..., 0] += torch.where(torch.arange(n) < n // 2, 1.0, -1.0)
    logits = 0.1 * torch.randn(2, 2, n, generator=generator) - 4.0 * (torch.arange(n) >= n // 2)
    return x.to(dtype), logits


def slow_sizes(x: Tensor, size: Tensor, importance: Tensor, keep: int) -> Tensor:
    """(B, keep) sizes when all tokens behind the `keep` first in rank join, one by one in fp64; prefix is 1."""
    grown = torch.zeros(len(x), keep, dtype=torch.float64)
    for b in range(len(x)):
        order = [0, *(1 + importance[b, 1:].argsort(descending=True, stable=True)).tolist()]
        for place, token in enumerate(order[:keep]):
            grown[b, place] = size[b, token]
        for token in order[keep:]:
            cosines = [
                torch.cosine_similarity(x[b, token].double(), x[b, t].double(), dim=0) for t in order[1:keep]
            ]
            assert max(cosines) < 0
            best = max(range(len(cosines)), key=lambda i: cosines[i])
            grown[b, 1 + best] += size[b, token].double() * cosines[best]
    return grown.clamp_min(1)


@pytest.mark.parametrize("large", [1.0, 3000.0])
def test_three_twins_where_every_similarity_is_negative(
    large: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropping, masking and kernels against loops: sizes shrink, stop at 1, and their logarithms stay finite."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(kernels, "INTERPRETED", not torch.cuda.is_available())
    n, keep = 20, 10
    x, logits = against(n, torch.float32)
    importance = logits.softmax(-1).mean(1)
    size = torch.linspace(1, large, n).flip(0).expand(2, -1).contiguous()
    size[:, 0] = 1
    wanted = slow_sizes(x, size, importance, keep)
    operator = Operator(operation="merge", importance="class-attention")
    dropped = reduce_tokens(Tokens(x, 1, size), importance[:, 1:], n, keep, operator)
    torch.testing.assert_close(dropped.size.double(), wanted, rtol=1e-4, atol=1e-4)
    if torch.cuda.is_available():
        x, size, logits = x.cuda(), size.cuda(), logits.cuda()
    base_2 = logits[:, :, None] * 1.4426950408889634
    with torch.no_grad():
        ranked = kernels.rank(base_2, 1, operator)
        fast, _ = kernels.reduce_tokens(Tokens(x, 1, size), ranked, n, keep, operator)
    torch.testing.assert_close(fast.size.cpu().double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast.x.cpu(), dropped.x, rtol=1e-4, atol=1e-5)
    assert fast.key_bias().isfinite().all()

    x, size = x.cpu(), size.cpu()
    order = importance[:, 1:].argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter(1, order, torch.arange(n - 1).expand(2, -1))
    kept = Kept(torch.tensor([keep - 1.0]), (torch.arange(n - 1) < keep - 1).float()[None])
    everything = Kept(torch.tensor([n - 1.0]), torch.ones(1, n - 1))
    masked = reduce_masked(
        Masked(x, size, torch.ones(2, n)), importance, rank, everything, kept, 0, 1, operator
    )
    for b in range(2):
        places = [0, *(1 + order[b, : keep - 1]).tolist()]
        torch.testing.assert_close(masked.size[b, places].double(), wanted[b], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(masked.x[b, places], dropped.x[b], rtol=1e-4, atol=1e-5)
    assert masked.size.log().isfinite().all()


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Tensor, Tensor | None, Tensor, int, int, int, Operator]:
    """One block's tokens, sizes, logits and counts: of any shape, scale and operator that the kernels take."""
    prefix, images = draw(st.integers(1, 4)), draw(st.integers(2, 40))
    n, b = prefix + images, draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    dtype = draw(st.sampled_from([torch.float32, torch.float16]))
    x = torch.randn(b, n, draw(st.sampled_from([16, 33, 64])), generator=generator)
    x = x * 10 ** (draw(st.sampled_from([0.0, 3.0])) * torch.rand(b, n, 1, generator=generator))
    size = None
    if draw(st.booleans()):
        size = 10 ** (draw(st.sampled_from([0.5, 4.0])) * torch.rand(b, n, generator=generator))
    logits = draw(st.sampled_from([1.0, 30.0])) * torch.randn(b, 2, n, generator=generator)
    merge = draw(st.integers(prefix, n - 1))
    prune = draw(st.integers(merge, n))
    operator = draw(
        st.sampled_from(
            [Operator(), Operator(mean="size"), Operator(operation="prune"), Operator(**OPERATORS[1])]
        )
    )
    return x.to(dtype), size, logits, prefix, prune, merge, operator


@settings(max_examples=15)
@given(blocks())
def test_kernels_are_their_twins_on_any_numbers(block) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    x, size, logits, prefix, prune, merge, operator = block
    device = "cuda" if torch.cuda.is_available() else "cpu"
    importance = (logits.double() * 0.6931471805599453).softmax(-1).mean(1).float()
    with torch.no_grad():
        ranked = kernels.rank(logits[:, :, None].to(device), prefix, operator)
        given_size = None if size is None else size.to(device)
        fast, _ = kernels.reduce_tokens(
            Tokens(x.to(device), prefix, given_size), ranked, prune, merge, operator
        )
    # The same order: importances that differ by less than fp32's rounding may be ranked either way.
    importance = torch.where(importance > 0, ranked.importance.cpu(), importance)
    plain = reduce_tokens(Tokens(x.double(), prefix, size), importance[:, prefix:], prune, merge, operator)
    longest = x.double().abs().max().item()
    tolerance = 1e-5 if x.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(fast.x.cpu().double(), plain.x, rtol=tolerance, atol=tolerance * longest)
    torch.testing.assert_close(fast.sizes().cpu(), plain.sizes(), rtol=1e-4, atol=1e-4)
    assert (bias := fast.key_bias()) is None or bias.isfinite().all()


@pytest.mark.parametrize("changes", OPERATORS[:2], ids=str)
def test_kernels_and_the_plain_path_bear_products_beyond_fp16(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(kernels, "INTERPRETED", not torch.cuda.is_available())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = steepened(random_vit(patch_size=8)).to(device, torch.float16)
    images = extreme_inputs((32, 32))["noise"].to(device, torch.float16)
    fast = diffrate.compress(model, diffrate.Schedule((17, 15, 12, 12), (17, 12, 12, 12)), **changes)
    with torch.inference_mode():
        tokens = backbone_of(model).start(images)
        ours = fast.forward_tokens(images)
        with kernels.using("plain"):
            plain = fast.forward_tokens(images)
    assert kernels.fast(tokens, fast.operator)
    assert ours.x.isfinite().all()
    assert (
        plain.x.isfinite().all()
    )  # and no more: fp16 rounds such logits by several units, each path in its way


@pytest.mark.parametrize("change", [without_positions, lambda model: steepened(model, 3.0)])
@pytest.mark.parametrize("name", extreme_inputs((32, 32)))
def test_masks_and_dropping_agree_on_extremes(change: Callable[[nn.Module], nn.Module], name: str) -> None:
    """Queries that are not so steep that importances are zero: of such ties, each takes the first in its own order."""
    model = change(random_vit())
    images = extreme_inputs((32, 32), patch=4)[name]
    counts = torch.tensor([48, 30, 9])
    kept = Kept(counts.float(), (torch.arange(64)[None] < counts[:, None]).float())
    schedule = diffrate.Schedule((65, 49, 31, 10), (65, 49, 31, 10))
    fast = diffrate.compress(model, schedule, operation="prune")
    with torch.no_grad():
        masked = masked_logits(backbone_of(model), images, kept, kept, [1, 2, 3], fast.operator)
        dropped = fast(images)
        half = masked_logits(
            backbone_of(model.bfloat16()), images.bfloat16(), kept, kept, [1, 2, 3], fast.operator
        )
    torch.testing.assert_close(masked, dropped, rtol=1e-3, atol=1e-3)
    assert half.isfinite().all()


def test_a_search_step_in_fp16_has_finite_gradients() -> None:
    """The masked forward and its backward pass, where bare products of queries and keys are beyond fp16."""
    model = steepened(random_vit(patch_size=8)).half()
    images = extreme_inputs((32, 32))["noise"].half()
    counts = torch.tensor([12.0, 8.0, 4.0], requires_grad=True)
    keep = (torch.arange(16)[None] < counts.detach()[:, None]).float().requires_grad_()
    kept = Kept(counts, keep)
    logits = masked_logits(
        backbone_of(model), images, kept, kept, [1, 2, 3], Operator(importance="class-attention")
    )
    assert logits.isfinite().all()
    logits.float().logsumexp(-1).sum().backward()
    assert keep.grad is not None
    assert keep.grad.isfinite().all()
    assert keep.grad.abs().max() > 0
