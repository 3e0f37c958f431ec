"""The kernels that rank and remove tokens against fp64 arithmetic on random and adversarial inputs."""

import pytest
import torch
from kernel_inputs import DEVICE, HALF, heads_of, probabilities, randn

from diffrate import kernels, ranking
from diffrate.backbones.base import Attention
from diffrate.operator import Operator
from diffrate.reduction import reduce_tokens
from diffrate.tokens import Tokens

pytest.importorskip("triton", reason="Triton is not installed")

from diffrate.kernels import ops, removal

PUBLISHED = Operator()
SEARCHED = Operator(operation="merge", mean="attention", choice="cost", floor=0.5)
STRETCHED = SEARCHED.changed(keep_norm=True)


def slow_order(importance, prefix):
    scores = importance.tolist()
    return [*range(prefix), *sorted(range(prefix, len(scores)), key=lambda j: -scores[j])]


@pytest.mark.parametrize("prefix", [1, 2, 5])
@pytest.mark.parametrize("kind", ["random", "ties", "all equal"])
def test_ranks_are_a_stable_sort(prefix, kind):
    logits = {
        "random": randn(3, 2, 41),
        "ties": randn(3, 2, 41).round(),
        "all equal": torch.zeros(3, 2, 41, device=DEVICE),
    }[kind]
    importance, order = ops.rank(logits[:, :, None], prefix, 0.0)
    torch.testing.assert_close(importance.double(), probabilities(logits).mean(1), rtol=1e-5, atol=1e-7)
    for b in range(3):
        assert order[b].tolist() == slow_order(importance[b], prefix)


def test_ranks_of_an_overflowed_model_are_still_an_order():
    logits = randn(1, 2, 20)
    logits[0, 1, 3] = float("nan")
    _, order = ops.rank(logits[:, :, None], 1, 0.0)
    assert sorted(order[0].tolist()) == list(range(20))


def scores(b, n, heads=2, seed=3):
    """Logits of the class token, and the importance that the twin takes in their place."""
    logits = 2 * randn(b, heads, n, seed=seed)
    return logits, probabilities(logits).mean(1).float()


def agree(x, size, logits, importance, prefix, prune, merge, operator, tolerance=1e-5):
    """The kernels' reduction against its twin's in fp64, and what they say of it against torch."""
    norm = torch.nn.LayerNorm(x.shape[-1], eps=1e-6, device=DEVICE, dtype=x.dtype)
    torch.nn.init.normal_(norm.weight, generator=torch.Generator(DEVICE).manual_seed(8))
    torch.nn.init.normal_(norm.bias, generator=torch.Generator(DEVICE).manual_seed(9))
    ranked = kernels.rank(logits[:, :, None], prefix, operator)
    with torch.no_grad():
        ours, normed = kernels.reduce_tokens(Tokens(x, prefix, size), ranked, prune, merge, operator, norm)
        torch.testing.assert_close(normed, norm(ours.x), rtol=tolerance, atol=3 * tolerance)
    double = Tokens(x.double(), prefix, size)
    wanted = reduce_tokens(double, importance[:, prefix:], prune, merge, operator)
    assert ours.x.dtype == x.dtype
    torch.testing.assert_close(ours.x.double(), wanted.x, rtol=tolerance, atol=tolerance)
    assert (ours.size is None) == (wanted.size is None)
    if wanted.size is not None:
        torch.testing.assert_close(ours.size, wanted.size, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.log_size, ours.size.log().to(x.dtype), rtol=1e-3, atol=1e-6)
        assert ours.log_size.stride(0) % 8 == 0
    return ours


@pytest.mark.parametrize(
    ("operator", "sized"),
    [
        (PUBLISHED, False),
        (PUBLISHED, True),
        (SEARCHED, True),
        (STRETCHED, True),
        (Operator(operation="prune"), True),
        (Operator(mean="size"), True),
    ],
    ids=["published", "published, sizes", "searched", "norms kept", "prune", "mean by size"],
)
@pytest.mark.parametrize(
    ("n", "prefix", "prune", "merge", "c"),
    [
        (29, 1, 25, 20, 48),  # no multiple of anything
        (29, 1, 29, 28, 32),  # one token merged
        (29, 1, 20, 20, 32),  # pruning alone
        (29, 1, 25, 1, 32),  # the class token alone is left
        (9, 1, 4, 2, 32),  # one image token left
        (40, 5, 30, 12, 32),  # registers, and most tokens merged
        (90, 1, 85, 80, 80),  # several tiles of targets
    ],
)
@pytest.mark.parametrize("many", [False, True])
def test_reduction_is_the_twins(operator, n, prefix, prune, merge, c, sized, many, monkeypatch):
    monkeypatch.setattr(removal, "MANY", 1 if many else 32)
    logits, importance = scores(2, n)
    size = 1 + 3 * randn(2, n, seed=5).abs() if sized else None
    agree(randn(2, n, c, seed=4), size, logits, importance, prefix, prune, merge, operator)


@pytest.mark.parametrize("operator", [PUBLISHED, STRETCHED])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("c", [192, 384, 768, 1024, 1280])
def test_reduction_at_the_widths_of_real_models(c, many, operator, monkeypatch):
    monkeypatch.setattr(removal, "MANY", 1 if many else 32)
    logits, importance = scores(1, 24)
    agree(randn(1, 24, c, seed=4), None, logits, importance, 1, 22, 18, operator)


def test_a_merged_token_is_as_long_as_its_longest_member():
    logits, _ = scores(2, 30)
    x = randn(2, 30, 48, seed=4) * torch.linspace(0.5, 3, 30, device=DEVICE)[:, None]
    ranked = kernels.rank(logits[:, :, None], 1, STRETCHED)
    with torch.no_grad():
        left, _ = kernels.reduce_tokens(Tokens(x, 1), ranked, 30, 12, STRETCHED)
    lengths = {round(float(length), 3) for length in x.norm(dim=-1).flatten()}
    assert {round(float(length), 3) for length in left.x.norm(dim=-1).flatten()} <= lengths


@pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)  # of the interpreter
@pytest.mark.parametrize("many", [False, True])
def test_what_cannot_be_stretched_stays_finite(many, monkeypatch):
    """A token and its negative, whose mean is nothing; tokens of nothing; squares beyond what fp32 holds."""
    monkeypatch.setattr(removal, "MANY", 1 if many else 32)
    logits, importance = scores(1, 9)
    one = randn(1, 1, 32)
    for x in (torch.cat([one, -one] * 4 + [one], dim=1), torch.zeros(1, 9, 32, device=DEVICE), one * 1e25):
        tokens = Tokens(x.expand(1, 9, 32).contiguous(), 1)
        ranked = kernels.rank(logits[:, :, None], 1, STRETCHED)
        with torch.no_grad():
            ours, _ = kernels.reduce_tokens(tokens, ranked, 9, 3, STRETCHED)
            plain = reduce_tokens(tokens, importance[:, 1:], 9, 3, STRETCHED)
        assert ours.x.isfinite().all()
        assert plain.x.isfinite().all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("operator", [PUBLISHED, SEARCHED, STRETCHED])
def test_reduction_in_half_precision(dtype, operator):
    logits, importance = scores(2, 29)
    x = randn(2, 29, 64, seed=4).to(dtype)
    agree(
        x, None, logits, importance, 1, 26, 20, operator, tolerance=2e-3 if dtype == torch.float16 else 2e-2
    )


def test_what_is_neither_pruned_nor_merged_keeps_every_bit():
    logits, importance = scores(2, 29)
    x = randn(2, 29, 32, seed=4)
    reduced = agree(x, None, logits, importance, 1, 26, 20, PUBLISHED)
    untouched = reduced.size == 1
    assert untouched.any()
    for b in range(2):
        rows = torch.tensor(slow_order(importance[b], 1))[:20]
        assert torch.equal(reduced.x[b][untouched[b]], x[b, rows.to(DEVICE)][untouched[b]])


@pytest.mark.parametrize("operator", [PUBLISHED, SEARCHED, STRETCHED])
def test_ties_take_the_earlier_token_and_target(operator):
    """Equal importances and equal tokens: the twin's choice is defined by position alone, and so is the kernels'."""
    logits = torch.zeros(1, 2, 40, device=DEVICE)
    importance = probabilities(logits).mean(1).float()
    patterns = torch.eye(4, device=DEVICE)[torch.arange(40, device=DEVICE) % 4]
    agree(torch.cat([patterns] * 8, dim=1)[None], None, logits, importance, 1, 36, 20, operator)


def test_equal_tokens_and_opposite_ones():
    logits, importance = scores(1, 20)
    same = randn(1, 1, 32).expand(1, 20, 32).contiguous()
    merged = agree(same, None, logits, importance, 1, 20, 5, Operator(operation="merge"))
    assert merged.size.sum().item() == pytest.approx(20, rel=1e-5)
    signs = torch.where(torch.arange(20, device=DEVICE) < 10, 1.0, -1.0)[None, :, None]
    size = torch.full((1, 20), 7.0, device=DEVICE)
    agree(same * signs, size, logits, importance, 1, 20, 2, Operator(operation="merge"))
    opposite = torch.cat([same[:, :2], -same[:, :1]], dim=1)  # the joiner is the negative of its only target
    first = torch.tensor([[[0.0, 3.0, 1.0]]], device=DEVICE)
    merged = agree(
        opposite,
        size[:, :3],
        first,
        probabilities(first).mean(1).float(),
        1,
        3,
        2,
        Operator(operation="merge"),
    )
    assert merged.size[0, 1].item() == 1.0  # 7 - 7, held at 1 so that its logarithm stays finite


def test_sizes_far_apart_and_importance_zero():
    logits, importance = scores(1, 24)
    logits[:, :, 10:] = -200.0  # beyond what fp32 holds: an importance of exactly zero
    importance = probabilities(logits).mean(1).float()
    size = 10 ** (5 * torch.rand(1, 24, generator=torch.Generator().manual_seed(2))).to(DEVICE)
    for operator in (SEARCHED, Operator(mean="size"), Operator(mean="attention")):
        reduced = agree(randn(1, 24, 32, seed=4), size, logits, importance, 1, 22, 12, operator)
        assert reduced.x.isfinite().all()
        assert reduced.size.log().isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("c", [48, 192, 1280])
def test_adding_and_norming(c, dtype):
    x, update = 100 * randn(2, 5, c).to(dtype), randn(2, 5, c, seed=1).to(dtype)
    weight, bias = randn(c, seed=2).to(dtype), randn(c, seed=3).to(dtype)
    out, normed = ops.add_norm(x, update, weight, bias, 1e-6)
    assert torch.equal(out, x + update)
    wide = out.double()
    apart = wide - wide.mean(-1, keepdim=True)
    unit = apart / (apart.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(normed.double(), unit * weight + bias, rtol=tolerance, atol=tolerance)


def test_no_images():
    ranked = kernels.rank(randn(0, 2, 1, 9), 1, PUBLISHED)
    empty, normed = kernels.reduce_tokens(Tokens(randn(0, 9, 32), 1), ranked, 8, 6, PUBLISHED)
    assert empty.x.shape == (0, 6, 32)
    assert normed is None
    assert torch.ops.diffrate.attend(*heads_of(0, 2, 9, 32), None, 1.0, True)[0].shape == (0, 2, 9, 32)
    assert torch.ops.diffrate.query_logits(*heads_of(0, 2, 9, 32)[:2], None, 1.0, 1, 0).shape == (0, 2, 1, 9)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("n", "prefix"), [(33, 1), (9, 5), (130, 2)])
def test_the_order_of_importance_is_the_twins(share, n, prefix):
    q, k, v = heads_of(2, 3, n, 64)
    size = 1 + randn(2, n, seed=1).abs()
    operator = Operator(importance="class-attention", image_share=share)
    attention = Attention(q, k, v, 0.125, 0.0)
    _, logits = kernels.attend_and_score(attention, size, size.log(), prefix, operator)
    ranked = kernels.rank(logits, prefix, operator)
    twin = ranking.class_attention(q, k, 0.125, size.log(), prefix, share)
    torch.testing.assert_close(ranked.importance[:, prefix:], twin, rtol=1e-4, atol=1e-6)
    order = twin.argsort(dim=-1, descending=True, stable=True)
    assert torch.equal(ranked.order[:, prefix:].long() - prefix, order)


def tokens_and_ranks():
    return randn(2, 9, 32), *ops.rank(randn(2, 2, 1, 9), 1, 0.0)


@pytest.mark.parametrize(
    "arguments",
    [
        lambda: ("query_logits", (*heads_of(2, 2, 9, 32)[:2], 1 + randn(2, 9).abs(), 0.2, 1, 15)),
        lambda: ("query_logits", (*heads_of(2, 2, 9, 32)[:2], None, 0.2, 1, 0)),
        lambda: ("attend", (*heads_of(2, 2, 9, 32), 1 + randn(2, 9).abs(), 0.2, True)),
        lambda: ("attend", (*heads_of(2, 2, 9, 32), None, 0.2, False)),
        lambda: ("attend_training", (*heads_of(2, 2, 9, 32), 1 + randn(2, 9).abs(), 0.2, True)),
        lambda: (
            "attend_back",
            (
                randn(2, 2, 9, 32),
                *heads_of(2, 2, 9, 32),
                1 + randn(2, 9).abs(),
                0.2,
                randn(2, 9, 2, 32).transpose(1, 2),
                randn(2, 2, 9),
            ),
        ),
        lambda: ("rank", (randn(2, 2, 16, 9), 1, 0.2)),
        lambda: (
            "reduce",
            (*tokens_and_ranks(), None, None, 1, 8, 6, "plain", False, 0.0, False, None, None, 0.0),
        ),
        lambda: (
            "reduce",
            (
                *tokens_and_ranks(),
                None,
                None,
                1,
                9,
                6,
                "attention",
                True,
                0.5,
                True,
                randn(32),
                randn(32),
                1e-6,
            ),
        ),
    ],
)
def test_what_torch_is_told_of_the_operators_is_what_they_do(arguments):
    name, values = arguments()
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.diffrate, name).default, values, test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("c", [48, 192, 1280])
def test_adding_and_measuring(c, dtype):
    x, update = 100 * randn(2, 5, c).to(dtype), randn(2, 5, c, seed=1).to(dtype)
    out, length = ops.add_measured(x, update)
    assert torch.equal(out, x + update)
    torch.testing.assert_close(length.double(), out.double().norm(dim=-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(ops.lengths(out), length, rtol=0, atol=0)
    assert ops.lengths(torch.zeros_like(x)).min() > 0  # cosines divide by it


def test_many_that_join_one():
    """One after the other, while the tokens beside it have none."""
    logits, importance = scores(2, 40)
    x = randn(2, 40, 48, seed=4)
    x[:, 1:] = x[:, 1:2] + 0.01 * x[:, 1:]
    x[:, 2] = -x[:, 1]
    for operator in (SEARCHED, STRETCHED, Operator(operation="merge", mean="size")):
        merged = agree(x, None, logits, importance, 1, 40, 4, operator)
        assert merged.size.max() > 12


def test_lengths_that_are_known_are_not_measured_again(monkeypatch):
    logits, _ = scores(2, 30)
    x = randn(2, 30, 48, seed=4)
    ranked, known = kernels.rank(logits[:, :, None], 1, STRETCHED), ops.lengths(x)
    wanted = kernels.reduce_tokens(Tokens(x, 1), ranked, 30, 12, STRETCHED)[0]
    monkeypatch.setattr(removal, "lengths", None)
    left = kernels.reduce_tokens(Tokens(x, 1, length=known), ranked, 30, 12, STRETCHED)[0]
    assert torch.equal(left.x, wanted.x)
