"""CAFormer: its third stage compressed and restored, the published schedules and what they cost."""

import contextlib
import functools

import pytest
import timm
import torch
from timm.models import metaformer
from timm.models._registry import _model_to_module
from torch.utils.data import TensorDataset

import diffrate
from backbones.slow import Slow, check, check_search, falling, noisy, remember, slow_logits
from conftest import flop_counter
from diffrate import Schedule
from diffrate.backbones import backbone_of
from diffrate.costs.macs import MacCost
from diffrate.operator import Operator
from diffrate.searching.budget import Space

NAMES = sorted(name for name in timm.list_models() if _model_to_module[name] == "metaformer")
MERGE = {"operation": "merge"}


@contextlib.contextmanager
def shrunk():
    """Let timm's entry points build 1, 1, 4 and 1 narrow blocks."""
    init = metaformer.MetaFormer.__init__

    @functools.wraps(init)
    def small(self, *args, **kwargs):
        kwargs = kwargs | {"depths": (1, 1, 4, 1), "dims": (16, 24, 64, 96)}
        init(self, *args, **kwargs)

    metaformer.MetaFormer.__init__ = small
    try:
        yield
    finally:
        metaformer.MetaFormer.__init__ = init


def build(name="caformer_s18"):
    """A model whose third stage sees a 6x6 grid at 96 pixels."""
    with shrunk():
        model = noisy(timm.create_model(name, num_classes=5))
    model.pretrained_cfg["input_size"] = (3, 96, 96)
    return model


def slow(model, merge_only=True):
    stage, last = model.stages[2], model.stages[3]
    grid = []

    def embed(image):
        x = stage.downsample(model.stages[1](model.stages[0](model.stem(image))))
        grid[:] = x.shape[2:]
        return x.flatten(2).transpose(1, 2)

    def attend(i, x, places):
        block = stage.blocks[i]
        return block.res_scale1(x) + block.layer_scale1(block.token_mixer(block.norm1(x)))

    def mlp(i, x):
        block = stage.blocks[i]
        return block.res_scale2(x) + block.layer_scale2(block.mlp(block.norm2(x)))

    def head(x, sizes, where):
        assert min(where) >= 0  # merging only: every patch is in some token
        whole = x[:, where].transpose(1, 2).reshape(1, -1, *grid)
        return model.head(last(whole))

    return Slow(embed, attend, mlp, head, 0, False, merge_only)


@pytest.mark.parametrize("name", NAMES)
def test_wraps_or_is_refused(name):
    model = build(name)
    if not name.startswith("caformer"):
        with pytest.raises(diffrate.UnsupportedModelError, match="no attention") as refused:
            diffrate.compress(model)
        remember("timm", name, str(refused.value))
        return
    check(model, slow(model), **MERGE)
    remember("timm", name)


def test_searches():
    check_search(build())


def test_the_papers_recipe_refuses_to_prune_before_a_folder_is_made(tmp_path):
    data = TensorDataset(torch.randn(20, 3, 96, 96), torch.zeros(20, dtype=torch.long))
    with pytest.raises(diffrate.DiffRateError, match="restores its grid with merging only"):
        diffrate.search(build(), data, "90%", recipe="paper", operator=Operator(), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_image_sizes_and_features():
    """96x160 pixels are a 6x10 grid: the schedule in proportion, the maps of every stage of the original's shape."""
    model = build()
    images = torch.randn(2, 3, 96, 160)
    fast = diffrate.compress(model, falling(model), **MERGE)
    with torch.no_grad():
        got = fast(images)
        reference = slow_logits(slow(model), images, fast.schedule.resized(60))
        torch.testing.assert_close(got, reference, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(fast.forward_head(fast.forward_features(images)), got)
        whole = diffrate.compress(model)
        for one, other in zip(
            whole.forward_intermediates(images)[1], model.forward_intermediates(images)[1], strict=True
        ):
            assert torch.equal(one, other)
        final, maps = fast.forward_intermediates(images, indices=[1, 2, 3])
        originals = model.forward_intermediates(images, indices=[1, 2, 3])[1]
    assert [x.shape for x in maps] == [x.shape for x in originals]
    assert torch.equal(maps[0], originals[0])
    assert torch.equal(final, maps[-1])
    distinct = torch.unique(maps[1][0].flatten(1).T, dim=0)
    assert len(distinct) == fast.schedule.resized(60).merge[-1]  # a token for each group of patches


@functools.cache
def caformer_s36():
    with torch.device("meta"):
        return timm.create_model("caformer_s36").eval().requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize("gmacs", [5.2, 5.6, 6.0])
def test_the_papers_figures(gmacs):
    model = caformer_s36()
    schedule = Schedule.published("caformer_s36", gmacs)
    assert schedule.operator.operation == "merge"
    assert diffrate.gmacs(model, schedule) == pytest.approx(gmacs, abs=0.02)
    with flop_counter() as counter:
        diffrate.compress(model, schedule)(torch.zeros(1, 3, 224, 224, device="meta"))
    assert diffrate.gmacs(model, schedule) == pytest.approx(counter.get_total_flops() / 2e9, rel=0.01)
    assert diffrate.gmacs(model) == pytest.approx(7.97, abs=0.005)  # 8.0 in the paper


def test_a_search_may_choose_every_block_but_the_first_and_last():
    model = build()
    backbone = backbone_of(model)
    space = Space.of(backbone, MacCost.of_backbone(backbone))
    assert space.least.tolist() == [36, 1, 1]
