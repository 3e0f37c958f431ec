"""The search's Triton kernels against their plain twins: on a GPU as they are, elsewhere in Triton's interpreter."""

import importlib.util

import pytest
import torch

from diffrate import masking
from diffrate.reduction import cosine

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def kernels():
    return pytest.importorskip("diffrate.masked_kernels")


def inputs(batch, heads, n, d, dtype=torch.float32):
    """q, k, v as a model's fused projection lays them out, biases, and masks with dead tokens."""
    torch.manual_seed(n * 1000 + d)
    q, k, v = torch.randn(batch, n, 3, heads, d, device=DEVICE).permute(2, 0, 3, 1, 4).to(dtype)
    bias = 4 * torch.rand(batch, n, device=DEVICE)
    mask = (torch.rand(batch, n, device=DEVICE) < 0.6).float()
    mask[:, 0] = 1
    mask[0, 1:] = 0  # an image with one live token
    return q, k, v, bias, mask


SHAPES = [(2, 2, 5, 16), (1, 3, 64, 32), (2, 1, 70, 80), (1, 1, 130, 64)]


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_its_twin(kernels, shape):
    q, k, v, bias, mask = inputs(*shape)
    out, log_sum = kernels.attend(q, k, v, bias, mask, 0.3)
    wanted, wanted_log_sum = masking._attend(*(x.double() for x in (q, k, v, bias)), mask, 0.3)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(log_sum.double(), wanted_log_sum, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_gradients_are_their_twins(kernels, shape):
    q, k, v, bias, mask = inputs(*shape)
    grad = torch.randn_like(q)
    exact = [x.double() for x in (q, k, v, bias)]
    out, log_sum = masking._attend(*exact, mask, 0.3)
    wanted = masking._attend_backward(grad.double(), *exact, mask, 0.3, out, log_sum)
    got = kernels.attend_backward(grad, q, k, v, bias, mask, 0.3, out.float(), log_sum.float())
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < 2e-3


@pytest.mark.parametrize(("n", "width"), [(5, 12), (64, 64), (100, 70)])
def test_matching_is_its_twin(kernels, n, width):
    torch.manual_seed(n)
    x = torch.randn(3, n, width, device=DEVICE)
    x[0] = x[0, :1]  # equal tokens: the first allowed one is taken
    target = torch.rand(3, n, device=DEVICE) < 0.5
    target[2] = False
    inverse = 1 / x.norm(dim=-1).clamp_min(1e-12)
    similarity, index = kernels.most_similar(x, inverse, target)
    wanted = cosine(x, x).masked_fill(~target[:, None, :], float("-inf"))
    torch.testing.assert_close(similarity, wanted.amax(dim=-1), rtol=1e-4, atol=1e-5)
    for b in range(2):
        assert target[b][index[b]].all()
        torch.testing.assert_close(
            wanted[b].gather(1, index[b].unsqueeze(-1)).squeeze(-1),
            wanted[b].amax(dim=-1),
            rtol=1e-4,
            atol=1e-5,
        )
    assert similarity[2].isneginf().all()


@pytest.mark.parametrize(("n", "width"), [(5, 12), (64, 64), (100, 70)])
def test_joining_is_its_twin(kernels, n, width):
    torch.manual_seed(n)
    x = torch.randn(3, n, width, device=DEVICE)
    own, sent = torch.rand(3, n, device=DEVICE), torch.rand(3, n, device=DEVICE)
    own[0], sent[0] = 1, 0  # nothing merges: every bit stays
    index = torch.randint(0, n, (3, n), device=DEVICE)
    joined = kernels.join(x, own, sent, index)
    assert torch.equal(joined[0], x[0])
    wanted = own[:, :, None] * x
    for b in range(3):
        for j in range(n):
            wanted[b, index[b, j]] += sent[b, j] * x[b, j]
    torch.testing.assert_close(joined, wanted, rtol=5e-3, atol=5e-3)


def test_gradient_of_joining():
    x = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    own, sent = torch.rand(2, 6).double(), torch.rand(2, 6).double()
    index = torch.randint(0, 6, (2, 6))
    assert torch.autograd.gradcheck(lambda x: masking.Join.apply(x, own, sent, index), (x,))


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_half_precision_step_on_the_gpu():
    """The whole masked attention in half precision, forward and backward, against fp64."""
    q, k, v, bias, mask = inputs(4, 6, 197, 64, torch.float16)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, mask)]
    grad = torch.randn_like(q)
    out = masking.MaskedAttention.apply(*leaves[:3], bias, leaves[3], 0.125)
    got = torch.autograd.grad(out, leaves, grad)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, mask)]
    reference = masking.MaskedAttention.apply(*exact[:3], bias.double(), exact[3], 0.125)
    wanted = torch.autograd.grad(reference, exact, grad.double())
    for ours, theirs in zip((out, *got), (reference, *wanted), strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < 5e-3
