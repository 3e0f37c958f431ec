"""The public contract of a compressed model: a drop-in for the original, which it leaves as it was."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import diffrate
from conftest import KINDS, batch, build, layout_of, shrinking
from diffrate import Schedule
from diffrate.operator import IMPORTANCES, MEANS, OPERATIONS

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(params=KINDS)
def model(request):
    return build(**KINDS[request.param])


# --- the same model, with fewer tokens ---------------------------------------------------------------------------


def test_nothing_removed_is_the_original_bit_for_bit(model):
    images, layout = batch(model), layout_of(model)
    wanted = model(images)
    identity = Schedule.identity(layout.depth, layout.tokens, layout.prefix)
    for fast in (diffrate.compress(model), diffrate.compress(model, identity)):
        assert torch.equal(fast(images), wanted)
        assert torch.equal(fast.forward_features(images), model.forward_features(images))
        for pre_logits in (False, True):
            features = model.forward_features(images)
            assert torch.equal(
                fast.forward_head(features, pre_logits), model.forward_head(features, pre_logits)
            )


def test_original_is_given_back_and_works_as_before(model):
    images = batch(model)
    before, state = model(images), copy.deepcopy(model.state_dict())
    fast = diffrate.compress(model, shrinking(model))
    assert fast(images).shape == before.shape
    assert not torch.equal(fast(images), before)
    assert fast.original is model
    assert torch.equal(model(images), before)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert diffrate.compress(fast).original is model


def test_weights_are_shared(model):
    fast = diffrate.compress(model, shrinking(model))
    before = fast(batch(model))
    model.patch_embed.proj.weight.mul_(1.5)
    assert not torch.equal(fast(batch(model)), before)
    assert {p.data_ptr() for p in fast.parameters()} == {p.data_ptr() for p in model.parameters()}


def test_modes_of_layers_survive_wrapping():
    model = build().train()
    model.blocks[1].eval()
    fast = diffrate.compress(model)
    assert fast.training
    assert not model.blocks[1].training
    fast.eval()
    assert not model.training


def test_counts_and_sizes_are_those_of_the_schedule(model):
    schedule = shrinking(model)
    fast = diffrate.compress(model, schedule)
    trace = fast.trace(batch(model))
    assert [tokens.count for tokens in trace] == list(schedule.merge)
    logits, tokens = fast(batch(model), return_tokens=True)
    torch.testing.assert_close(logits, fast(batch(model)), rtol=1e-5, atol=1e-6)
    assert tokens.count == schedule.merge[-1]
    layout = fast.backbone.layout
    assert tokens.patches.shape == (2, layout.tokens - layout.prefix)
    assert diffrate.restore(tokens.x, tokens.patches).shape == (2, layout.tokens - layout.prefix, 32)


def test_images_of_a_batch_do_not_meet(model):
    fast, images = diffrate.compress(model, shrinking(model)), batch(model, 3)
    alone = torch.cat([fast(image[None]) for image in images])
    torch.testing.assert_close(fast(images), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rising_counts_run_as_their_running_minimum(operation):
    model = build()
    rising = Schedule([17, 9, 12, 12], [17, 8, 11, 5])
    running = Schedule([17, 9, 8, 8], [17, 8, 8, 5])
    one, other = (diffrate.compress(model, schedule, operation=operation) for schedule in (rising, running))
    assert torch.equal(one(batch(model)), other(batch(model)))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("mean", MEANS)
def test_every_operator_runs(operation, mean):
    model = build()
    fast = diffrate.compress(model, shrinking(model), operation=operation, mean=mean)
    assert fast(batch(model)).isfinite().all()
    assert (fast.operator.operation, fast.operator.mean) == (operation, mean)


def test_options_change_what_is_computed():
    model, schedule = build(), shrinking(build())
    images = batch(model)
    options = [{}, {"operation": "prune"}, {"operation": "merge"}, {"operation": "merge-prune"}]
    options += [{"proportional": False}, {"mean": "size"}, {"choice": "cost"}]
    options += [{"importance": name} for name in IMPORTANCES if name not in ("auto", "class-attention")]
    options += [{"importance": "random", "seed": 1}]
    outputs = [diffrate.compress(model, schedule, **changes)(images) for changes in options]
    for i, a in enumerate(outputs):
        for b in outputs[:i]:
            assert not torch.allclose(a, b)
    assert torch.equal(diffrate.compress(model, schedule, importance="class-attention")(images), outputs[0])


def test_operator_of_the_schedule_is_used_unless_told_otherwise():
    model = build()
    schedule = Schedule([17, 9, 9, 9], [17, 9, 9, 9], operator=diffrate.Operator(importance="random", seed=4))
    assert diffrate.compress(model, schedule).operator.importance == "random"
    assert (
        diffrate.compress(model, schedule, importance="image-attention").operator.importance
        == "image-attention"
    )
    with pytest.raises(diffrate.DiffRateError, match="operation must be one of"):
        diffrate.compress(model, schedule, operation="drop")


# --- checkpoints -------------------------------------------------------------------------------------------------


def test_state_dict_is_the_originals(model):
    fast = diffrate.compress(model, shrinking(model))
    ours, theirs = fast.state_dict(), model.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_checkpoints_load_both_ways():
    model, other = build(), build()
    for parameter in other.parameters():
        parameter.add_(0.1)
    schedule = shrinking(model)
    wanted = diffrate.compress(other, schedule)(batch(model))
    fast = diffrate.compress(model, schedule)
    checkpoint = copy.deepcopy(other.state_dict())
    assert not any(fast.load_state_dict(checkpoint))
    assert list(checkpoint) == list(other.state_dict())  # the caller's dict is left alone
    assert torch.equal(fast(batch(model)), wanted)
    plain = build()
    plain.load_state_dict(fast.state_dict())
    assert torch.equal(plain(batch(model)), other(batch(model)))


def test_state_dict_inside_another_module():
    model = build()
    outer = nn.ModuleDict({"head": nn.Linear(2, 2), "fast": diffrate.compress(model, shrinking(model))})
    plain = nn.ModuleDict({"head": nn.Linear(2, 2), "fast": build()})
    assert list(outer.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(outer.state_dict())
    outer.load_state_dict(plain.state_dict())


# --- what users do to a module -----------------------------------------------------------------------------------


def test_deepcopy_and_pickle_are_independent(model):
    fast, images = diffrate.compress(model, shrinking(model)), batch(model)
    wanted = fast(images)
    saved = io.BytesIO()
    torch.save(fast, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    copies = [copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), loaded]
    for other in copies:
        assert torch.equal(other(images), wanted)
        assert list(other.state_dict()) == list(fast.state_dict())
        assert other.original is not model
        assert other.backbone.model is other.original
    model.patch_embed.proj.weight.zero_()
    assert all(torch.equal(other(images), wanted) for other in copies)
    state = fast.state_dict()  # hooks of a copy must still translate keys
    copies[0].load_state_dict(state)
    assert torch.equal(copies[0](images), fast(images))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(model, dtype):
    fast, images = diffrate.compress(model, shrinking(model)), batch(model)
    wanted = fast(images)
    other = copy.deepcopy(fast).half() if dtype == torch.float16 else copy.deepcopy(fast).to(dtype)
    logits = other(images.to(dtype))
    assert logits.dtype == dtype
    assert logits.isfinite().all()
    if dtype == torch.float64:
        torch.testing.assert_close(logits.float(), wanted, rtol=1e-3, atol=1e-4)


def test_bfloat16_autocast(model):
    fast, images = diffrate.compress(model, shrinking(model)), batch(model)
    with torch.autocast("cpu", torch.bfloat16):
        logits, tokens = fast(images, return_tokens=True)
        plain = model(images)
    assert logits.dtype == plain.dtype
    assert logits.isfinite().all()
    assert tokens.sizes().dtype == torch.float32


def test_to_another_device():
    model = build()
    fast = diffrate.compress(model, shrinking(model)).to("meta")
    assert fast(batch(model.to("meta")).to("meta")).shape == (2, 5)


@pytest.mark.parametrize(
    ("kind", "backend"), [("registers", "aot_eager"), ("mean-pooled", "eager"), ("attention-pooled", "eager")]
)
def test_compiles_without_a_break(kind, backend):
    model = build(**KINDS[kind])
    fast, images = diffrate.compress(model, shrinking(model)), batch(model)
    torch._dynamo.reset()
    compiled = torch.compile(fast, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(images), fast(images), rtol=1e-4, atol=1e-5)


def test_compiles_with_the_patch_map():
    model = build()
    fast, images = diffrate.compress(model, shrinking(model)), batch(model)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fast(x, return_tokens=True), fullgraph=True, backend="eager")
    logits, tokens = compiled(images)
    wanted, map_of = fast(images, return_tokens=True)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(tokens.patches, map_of.patches)


def test_exports():
    model = build()
    fast, images = diffrate.compress(model, shrinking(model)), batch(model)
    exported = torch.export.export(fast, (images,))
    torch.testing.assert_close(exported.module()(images), fast(images), rtol=1e-4, atol=1e-5)


def test_gradients_reach_every_weight():
    model = build()
    fast = diffrate.compress(model, shrinking(model)).train()
    with torch.enable_grad():
        fast(batch(model)).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert sum(bool(p.grad.abs().sum() > 0) for p in model.parameters()) > 0.9 * len(list(model.parameters()))


def test_distilled_models_have_two_heads_in_training():
    model = build("deit_tiny_distilled_patch16_224")
    model.set_distilled_training(True)
    whole, fast = diffrate.compress(model), diffrate.compress(model, shrinking(model))
    assert fast.backbone.layout.prefix == 2
    images = batch(model)
    assert torch.equal(whole(images), model(images))
    assert fast(images).shape == (2, 5)
    fast.train()
    one, two = fast(images)
    assert one.shape == two.shape == (2, 5)
    assert not torch.allclose(one, two)
    for ours, theirs in zip(whole(images), model(images), strict=True):
        assert torch.equal(ours, theirs)


# --- other inputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [{}, {"reg_tokens": 3}, {"global_pool": "avg", "class_token": False}], ids=str
)
def test_dynamic_image_sizes(kind):
    model = build(dynamic_img_size=True, **kind)
    schedule = shrinking(model)
    fast = diffrate.compress(model, schedule)
    for height, width in ((32, 32), (64, 32), (16, 16), (48, 80)):
        images = torch.randn(2, 3, height, width)
        assert torch.equal(diffrate.compress(model)(images), model(images))
        logits, tokens = fast(images, return_tokens=True)
        assert logits.isfinite().all()
        patches = height * width // 64
        assert tokens.patches.shape == (2, patches)
        assert tokens.count == schedule.resized(schedule.prefix + patches).effective.merge[-1]
        (grid,) = fast.get_intermediate_layers(images, reshape=True)
        assert grid.shape == (2, 32, height // 8, width // 8)


def test_a_smaller_image_never_costs_a_prefix_token():
    """A schedule that was written without knowing of registers still keeps them when it is resized."""
    model = build(dynamic_img_size=True, reg_tokens=4)
    unaware = Schedule([21, 9, 6, 6], [21, 8, 6, 5], prefix=1)
    fast = diffrate.compress(model, unaware)
    assert fast.schedule.prefix == 5
    assert fast(torch.randn(1, 3, 32, 32), return_tokens=True)[1].count == 5
    assert fast(torch.randn(1, 3, 16, 16), return_tokens=True)[1].count == 5


def test_keeping_the_prefix_alone():
    model = build(reg_tokens=2)
    fast = diffrate.compress(model, Schedule([19, 3, 3, 3], [19, 3, 3, 3], prefix=3))
    logits, tokens = fast(batch(model), return_tokens=True)
    assert logits.isfinite().all()
    assert (tokens.patches < 0).all()


def test_what_timm_reads_from_a_model(model):
    fast = diffrate.compress(model)
    assert fast.pretrained_cfg == fast.default_cfg == model.pretrained_cfg
    assert (fast.num_classes, fast.num_features) == (model.num_classes, model.num_features)
    assert "kept tokens" in repr(fast)
