"""The kernels of attention against fp64 arithmetic on random and adversarial inputs."""

import pytest
import torch
from kernel_inputs import DEVICE, HALF, heads_of, probabilities, randn

pytest.importorskip("triton", reason="Triton is not installed")


def slow_row(q, k, size, scale):
    """The class token's attention in fp64, without softmax."""
    logits = q[:, :, 0].double()[:, :, None] @ k.double().transpose(-2, -1) * scale
    weight = (logits - logits.amax(-1, keepdim=True)).exp()
    if size is not None:
        weight = weight * size.double()[:, None, None]
    return (weight / weight.sum(-1, keepdim=True))[:, :, 0]


@pytest.mark.parametrize("sizes", ["none", "near", "far apart"])
@pytest.mark.parametrize(
    ("b", "heads", "n", "d"), [(1, 1, 1, 64), (2, 3, 37, 64), (1, 2, 70, 80), (2, 2, 17, 32), (1, 1, 130, 72)]
)
def test_class_row(b, heads, n, d, sizes):
    q, k, _ = heads_of(b, heads, n, d)
    size = {
        "none": None,
        "near": 1 + randn(b, n, seed=1).abs(),
        "far apart": 10 ** (4 * torch.rand(b, n, generator=torch.Generator().manual_seed(2))).to(DEVICE),
    }[sizes]
    row = slow_row(q, k, size, d**-0.5)
    logits = torch.ops.diffrate.query_logits(q, k, size, d**-0.5, 1, 0)
    torch.testing.assert_close(probabilities(logits)[:, :, 0], row, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", HALF)
def test_class_row_in_half_precision(dtype):
    q, k, _ = heads_of(1, 2, 50, 64, dtype)
    size = 1 + randn(1, 50, seed=1).abs()
    logits = torch.ops.diffrate.query_logits(q, k, size, 0.125, 1, 0)
    torch.testing.assert_close(
        probabilities(logits)[:, :, 0], slow_row(q, k, size, 0.125), rtol=1e-4, atol=1e-6
    )


def slow_attention(q, k, v, size, scale):
    """Attention in fp64 in which a key counts as often as its size says."""
    logits = q.double() @ k.double().transpose(-2, -1) * scale
    weight = (logits - logits.amax(-1, keepdim=True)).exp()
    if size is not None:
        weight = weight * size.double()[:, None, None]
    return weight / weight.sum(-1, keepdim=True) @ v.double()


@pytest.mark.parametrize("sizes", ["none", "far apart"])
@pytest.mark.parametrize(
    ("b", "heads", "n", "d"), [(1, 1, 1, 64), (2, 3, 37, 64), (1, 2, 70, 80), (1, 1, 130, 32)]
)
def test_attention_and_its_first_row(b, heads, n, d, sizes):
    q, k, v = heads_of(b, heads, n, d)
    draw = torch.Generator().manual_seed(2)
    size = None if sizes == "none" else 10 ** (4 * torch.rand(b, n, generator=draw)).to(DEVICE)
    mixed, logits = torch.ops.diffrate.attend(3 * q, k, v, size, d**-0.5, True)
    torch.testing.assert_close(
        mixed.double(), slow_attention(3 * q, k, v, size, d**-0.5), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        probabilities(logits)[:, :, 0], slow_row(3 * q, k, size, d**-0.5), rtol=1e-4, atol=1e-6
    )
    assert mixed.transpose(1, 2).is_contiguous()  # as the output projection reads it
    without, nothing = torch.ops.diffrate.attend(3 * q, k, v, size, d**-0.5, False)
    assert torch.equal(without, mixed)
    assert nothing.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(
    ("b", "heads", "n", "d"), [(1, 1, 1, 64), (2, 3, 37, 48), (1, 2, 70, 64), (1, 1, 128, 32)]
)
def test_attention_in_training_and_its_gradient(b, heads, n, d, dtype):
    q, k, v = (t.detach().requires_grad_() for t in heads_of(b, heads, n, d, dtype))
    size = 10 ** (4 * torch.rand(b, n, generator=torch.Generator().manual_seed(2))).to(DEVICE)
    mixed, logits, _ = torch.ops.diffrate.attend_training(q, k, v, size, 3 * d**-0.5, True)
    upstream = randn(b, heads, n, d, seed=5).to(dtype)
    found = torch.autograd.grad(mixed, (q, k, v), upstream)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wanted = slow_attention(*exact, size, 3 * d**-0.5)
    coarse = 1.0 if dtype == torch.float32 else 2000 * torch.finfo(dtype).eps / torch.finfo(torch.float16).eps
    torch.testing.assert_close(mixed.double(), wanted, rtol=1e-4, atol=1e-5 * coarse)
    for ours, theirs in zip(found, torch.autograd.grad(wanted, exact, upstream.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=2e-5 * coarse)
    row = slow_row(q.detach(), k.detach(), size, 3 * d**-0.5)
    torch.testing.assert_close(probabilities(logits.detach())[:, :, 0], row, rtol=1e-4, atol=1e-6)
    assert torch.ops.diffrate.attend_training(q, k, v, size, d**-0.5, False)[1].numel() == 0


@pytest.mark.parametrize("dtype", HALF)
def test_attention_in_half_precision(dtype):
    q, k, v = heads_of(1, 2, 50, 64, dtype)
    size = 1 + randn(1, 50, seed=1).abs()
    mixed, logits = torch.ops.diffrate.attend(q, k, v, size, 0.125, True)
    tolerance = 2e-3 if dtype == torch.float16 else 1.6e-2
    wanted = slow_attention(q, k, v, size, 0.125)
    torch.testing.assert_close(mixed.double(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        probabilities(logits)[:, :, 0], slow_row(q, k, size, 0.125), rtol=1e-4, atol=1e-6
    )
