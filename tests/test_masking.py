"""The search-time forward: equal to the dropping forward, with the gradient of the paper's equation 10."""

import pytest
import torch

import diffrate
from conftest import random_vit
from diffrate.backbones import backbone_of
from diffrate.masking import MaskedAttention, masked_logits
from diffrate.operator import Operator
from diffrate.proxy import DiscreteProxy, Kept, proxy_of


def certain(counts, patches):
    """Proxies that keep exactly these image tokens."""
    counts = torch.tensor(counts)
    keep = (torch.arange(patches)[None] < counts[:, None]).float()
    return Kept(counts.float(), keep)


def test_counts_that_rise_or_do_not_merge_drop_what_their_masks_hide():
    prune, merge = [50, 30, 40], [48, 35, 25]
    model = random_vit()
    schedule = diffrate.Schedule([65, *(n + 1 for n in prune)], [65, *(n + 1 for n in merge)], 1)
    images = torch.randn(3, 3, 32, 32)
    fast = diffrate.compress(model, schedule)
    with torch.no_grad():
        masked = masked_logits(
            backbone_of(model), images, certain(prune, 64), certain(merge, 64), [1, 2, 3], fast.operator
        )
        torch.testing.assert_close(masked, fast(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operation", ["prune-merge", "merge", "prune"])
@pytest.mark.parametrize("mean", ["plain", "size", "attention"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reg_tokens": 2, "init_values": 0.5, "qk_norm": True},
        {"global_pool": "avg"},
        {"global_pool": "avg", "class_token": False},
    ],
    ids=["class", "registers", "mean-pooled", "no-class"],
)
def test_masked_forward_equals_dropping_forward(operation, mean, changes):
    model = random_vit(**changes)
    layout = backbone_of(model).layout
    prune, merge = [50, 40, 20], [48, 30, 9]
    if not layout.compresses_last_block:
        prune, merge = [*prune[:2], 30], [*merge[:2], 30]
    pruned, merged = ([n + layout.prefix for n in (64, *counts)] for counts in (prune, merge))
    schedule = diffrate.Schedule(pruned, merged, layout.prefix)
    images = torch.randn(3, 3, 32, 32)
    fast = diffrate.compress(model, schedule, operation=operation, mean=mean)
    with torch.no_grad():
        dropped = fast(images)
        masked = masked_logits(
            backbone_of(model), images, certain(prune, 64), certain(merge, 64), [1, 2, 3], fast.operator
        )
    torch.testing.assert_close(masked, dropped, rtol=1e-4, atol=1e-4)


def test_attention_gradients_match_the_plain_formula():
    """Against autograd through equations 8 and 9 written out, in fp64, with live and dead keys."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.rand(2, 6, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1, 0, 1], [1, 0, 1, 1, 1, 1]], dtype=torch.float64, requires_grad=True)
    out = MaskedAttention.apply(q, k, v, bias, mask, 0.5)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v, mask), grad)

    logits = q @ k.transpose(-2, -1) * 0.5 + bias[:, None, None]
    eye = torch.eye(6, dtype=torch.float64)
    seen = eye + (1 - eye) * mask[:, None, None]  # eq. 8
    weight = logits.exp() * seen
    plain = (weight / weight.sum(-1, keepdim=True)) @ v  # eq. 9
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(ours, torch.autograd.grad(plain, (q, k, v, mask), grad), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_gradient_on_probabilities_is_equation_10():
    """dL/drho_k = sum over ranks of dL/dm_r x [candidate k keeps rank r], for an arbitrary dL/dm."""
    torch.manual_seed(0)
    proxy = DiscreteProxy(blocks=1, patches=16, granularity=4)
    probability = torch.rand(1, 4).softmax(-1).requires_grad_(True)
    kept = proxy_of(probability, proxy.candidates, proxy.reach)
    rank = torch.randperm(16)[None]
    from diffrate.proxy import hard_mask

    wanted_mask = (rank < (probability.detach() @ proxy.candidates).ceil()).float()
    mask = hard_mask(kept.keep[0], kept.count[0], rank)
    assert torch.equal(mask.detach(), wanted_mask)
    by_mask = torch.randn(1, 16)
    (got,) = torch.autograd.grad(mask, probability, by_mask)
    by_hand = [sum(by_mask[0, j] for j in range(16) if rank[0, j] < c) for c in (16, 12, 8, 4)]
    torch.testing.assert_close(got[0], torch.stack(by_hand))


def gradients(prune_count: int, merge_count: int, operation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """dL/dkeep of 64 ranks in the block between, for both proxies; the other blocks keep all."""
    model = random_vit()
    prune, merge = (certain([64, count, 64], 64) for count in (prune_count, merge_count))
    for kept in (prune, merge):
        kept.keep.requires_grad_(True)
    operator = Operator(importance="class-attention", operation=operation)
    images = torch.randn(2, 3, 32, 32)
    logits = masked_logits(backbone_of(model), images, prune, merge, [1, 2, 3], operator)
    found = torch.autograd.grad(logits.logsumexp(-1).sum(), (prune.keep, merge.keep), allow_unused=True)
    return tuple(torch.zeros(64) if each is None else each[1] for each in found)


def test_masks_carry_gradients_for_dead_and_live_tokens():
    by_prune, by_merge = gradients(40, 24, "prune-merge")
    assert by_merge[:24].abs().min() > 0
    assert by_merge[24:40].abs().min() > 0
    assert not by_merge[40:].any()  # pruned already
    assert by_prune[:24].abs().min() > 0
    # The paper's dead end: a token under the prune boundary that came back would be merged in the same block.
    assert not by_prune[24:].any()


@pytest.mark.parametrize("merge_count", [40, 48])
def test_a_merge_count_that_merges_nothing_has_no_gradient_and_the_prune_count_has_all(merge_count):
    by_prune, by_merge = gradients(40, merge_count, "prune-merge")
    assert not by_merge.any()
    assert by_prune.abs().min() > 0


@pytest.mark.parametrize("operation", ["prune", "merge"])
def test_one_operation_alone_has_gradients_for_dead_and_live_tokens(operation):
    by_prune, by_merge = gradients(64, 24, operation)
    assert not by_prune.any()
    assert by_merge.abs().min() > 0


def test_proxy_expectation_and_certainty():
    proxy = DiscreteProxy(2, 196, 4)
    assert proxy().count.tolist() == [100, 100]  # the mean of 196, 192, …, 4
    with torch.no_grad():
        proxy.logits[1, 3] = 100.0
    assert proxy().count[1].item() == 184
    assert proxy().keep[1, :184].min() > 0.999
    assert proxy().keep[1, 184:].max() < 0.001
