"""Features and intermediate layers of a compressed model: what its head takes, in the original's shapes."""

import pytest
import torch

import diffrate
from conftest import KINDS, batch, build, shrinking
from diffrate import ScheduleError
from diffrate.operator import OPERATIONS

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(params=KINDS)
def model(request):
    return build(**KINDS[request.param])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_features_and_head_are_forward(model, operation):
    fast, images = diffrate.compress(model, shrinking(model), operation=operation), batch(model)
    features = fast.forward_features(images)
    assert features.shape == (2, fast.schedule.merge[-1], 32)
    # For logits alone the last block runs for the class token only, whose sums then add up in another order.
    torch.testing.assert_close(fast.forward_head(features), fast(images), rtol=1e-5, atol=1e-6)
    pooled = fast.forward_head(features, pre_logits=True)
    torch.testing.assert_close(model.head(pooled), fast(images), rtol=1e-5, atol=1e-6)
    tokens = fast.forward_tokens(images)
    torch.testing.assert_close(
        fast.forward_head(tokens.x, size=tokens.sizes()), fast(images), rtol=1e-4, atol=1e-5
    )


def test_a_mean_pooled_head_asks_for_the_sizes_it_needs():
    model = build(global_pool="avg")
    fast = diffrate.compress(model, shrinking(model))
    with pytest.raises(ScheduleError, match="needs their sizes"):
        fast.forward_head(fast.forward_features(batch(model)).clone())


@pytest.mark.parametrize("fmt", ["NCHW", "NLC"])
@pytest.mark.parametrize("indices", [None, 2, [0, 2]])
@pytest.mark.parametrize("norm", [False, True])
def test_intermediates_are_like_the_originals(model, fmt, indices, norm):
    images = batch(model)
    options = {"indices": indices, "output_fmt": fmt, "norm": norm, "return_prefix_tokens": True}
    final, wanted = model.forward_intermediates(images, **options)
    same_final, same = diffrate.compress(model).forward_intermediates(images, **options)
    _, fewer = diffrate.compress(model, shrinking(model)).forward_intermediates(images, **options)
    assert torch.equal(final, same_final)
    assert len(wanted) == len(same) == len(fewer)
    for theirs, ours, restored in zip(wanted, same, fewer, strict=True):
        if not isinstance(theirs, tuple):
            theirs, ours, restored = (theirs,), (ours,), (restored,)
        for a, b, c in zip(theirs, ours, restored, strict=True):
            assert torch.equal(a, b)
            assert a.shape == c.shape
            assert c.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"n": (1, 3), "reshape": True, "norm": True}], ids=str)
def test_get_intermediate_layers_is_like_the_originals(model, options):
    images = batch(model)
    wanted = model.get_intermediate_layers(images, **options)
    same = diffrate.compress(model).get_intermediate_layers(images, **options)
    fewer = diffrate.compress(model, shrinking(model)).get_intermediate_layers(images, **options)
    assert len(wanted) == len(same) == len(fewer)
    for a, b, c in zip(wanted, same, fewer, strict=True):
        assert torch.equal(a, b)
        assert a.shape == c.shape
