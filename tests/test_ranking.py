"""Importance metrics against whole attention matrices, and the random one against itself."""

import pytest
import torch

from diffrate import ranking
from diffrate.tokens import Tokens

B, HEADS, N, D, PREFIX = 2, 3, 9, 4, 2
SCALE = 0.37


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    return [2 * torch.randn(B, HEADS, N, D, generator=generator) for _ in range(3)]


@pytest.fixture(params=[False, True], ids=["no-sizes", "sizes"])
def bias(request):
    return torch.linspace(1, 5, B * N).reshape(B, N).log() if request.param else None


def attention(q, k, bias):
    """(B, heads, N, N), entry by entry in fp64."""
    out = torch.zeros(B, HEADS, N, N, dtype=torch.float64)
    for b in range(B):
        for h in range(HEADS):
            for i in range(N):
                logits = torch.stack(
                    [(q[b, h, i].double() * k[b, h, j].double()).sum() * SCALE for j in range(N)]
                )
                if bias is not None:
                    logits = logits + bias[b].double()
                out[b, h, i] = logits.exp() / logits.exp().sum()
    return out


def close(ours, theirs):
    assert ours.dtype == torch.float32
    assert ours.shape == (B, N - PREFIX)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


def test_class_attention(qkv, bias):
    q, k, _ = qkv
    close(
        ranking.class_attention(q, k, SCALE, bias, PREFIX),
        attention(q, k, bias)[:, :, 0].mean(dim=1)[:, PREFIX:],
    )


def test_a_share_may_come_from_image_tokens(qkv, bias):
    q, k, _ = qkv
    whole = attention(q, k, bias).mean(dim=1)
    spread = [2, 2, 2, 3, 3, 4, 4, 5, 5, 5, 6, 6, 7, 7, 8]  # 15 places among tokens 2 to 8
    assert ranking.image_queries(N, PREFIX).tolist() == spread
    others = torch.stack([whole[:, i] for i in spread]).mean(dim=0)
    close(
        ranking.class_attention(q, k, SCALE, bias, PREFIX, image_share=0.25),
        (0.75 * whole[:, 0] + 0.25 * others)[:, PREFIX:],
    )


def test_a_share_with_a_bias_of_every_pair_of_tokens(qkv):
    q, k, _ = qkv
    keys = torch.linspace(1, 5, B * N).reshape(B, N).log()
    pairs = keys[:, None, None].expand(B, HEADS, N, N)
    torch.testing.assert_close(
        ranking.class_attention(q, k, SCALE, pairs, PREFIX, 0.25),
        ranking.class_attention(q, k, SCALE, keys, PREFIX, 0.25),
    )


def test_class_attention_value(qkv, bias):
    q, k, v = qkv
    weighted = attention(q, k, bias)[:, :, 0] * v.double().square().sum(-1).sqrt()
    close(
        ranking.class_attention_value(q, k, v, SCALE, bias, PREFIX),
        weighted.mean(dim=1)[:, PREFIX:],
    )


def test_image_attention(qkv, bias):
    q, k, _ = qkv
    received = torch.stack([attention(q, k, bias)[..., j].mean(dim=(1, 2)) for j in range(N)], dim=1)
    close(ranking.image_attention(ranking.attention_weights(q, k, SCALE, bias), PREFIX), received[:, PREFIX:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_of_half_precision_models_are_fp32(qkv, dtype):
    q, k, v = (t.to(dtype) for t in qkv)
    for scores in (
        ranking.class_attention(q, k, SCALE, None, PREFIX),
        ranking.class_attention_value(q, k, v, SCALE, None, PREFIX),
        ranking.image_attention(ranking.attention_weights(q, k, SCALE, None), PREFIX),
    ):
        assert scores.dtype == torch.float32
    whole = attention(q, k, None)[:, :, 0].mean(dim=1)[:, PREFIX:]
    torch.testing.assert_close(
        ranking.class_attention(q, k, SCALE, None, PREFIX).double(), whole, rtol=0.1, atol=1e-3
    )


def random_scores(block=3, seed=5, tokens=197, batch=2, dim=8):
    return ranking.random_importance(torch.randn(batch, tokens, dim), 1, block, seed)


def test_random_importance_depends_on_block_and_seed_alone():
    scores = random_scores()
    assert scores.shape == (2, 196)
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores, random_scores())
    assert torch.equal(scores[:1], random_scores(batch=1, dim=3))
    orders = {
        tuple(random_scores(block, seed)[0].argsort().tolist()) for block in range(4) for seed in range(4)
    }
    assert len(orders) == 16
    assert random_scores(seed=2**31 - 1).isfinite().all()


def test_random_importance_is_spread_evenly():
    scores = torch.cat([random_scores(block, seed)[0] for block in range(12) for seed in range(8)])
    assert scores.min() >= 0
    assert scores.max() < 1
    histogram = torch.histc(scores, bins=10, min=0, max=1) / len(scores)
    assert (histogram - 0.1).abs().max() < 0.01
    # No position is favoured: over many draws each is kept about as often as any other.
    kept = (
        torch.stack([random_scores(b, s)[0] > 0.5 for b in range(12) for s in range(20)]).float().mean(dim=0)
    )
    assert kept.min() > 0.3
    assert kept.max() < 0.7


def test_importance_remembers_a_share_of_what_it_was():
    now, before = torch.tensor([[0.2, 0.8]]), torch.tensor([[1.0, 0.6, 0.4]])  # the class token's comes first
    tokens = Tokens(torch.zeros(1, 3, 4), 1, importance=before)
    torch.testing.assert_close(ranking.remembered(now, tokens, 0.25), torch.tensor([[0.3, 0.7]]))
    assert ranking.remembered(now, tokens, 0.0) is now
    assert ranking.remembered(now, Tokens(torch.zeros(1, 3, 4), 1), 0.25) is now
