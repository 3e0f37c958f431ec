"""timm's BEiT and ViT-RelPos: the bias of each pair of positions follows the tokens."""

import contextlib
import functools

import pytest
import timm
import torch
from timm.models import beit, vision_transformer_relpos
from timm.models._registry import _model_to_module

import diffrate
from backbones.slow import Slow, check_search, falling, noisy, remember, slow_logits
from conftest import every_token, flop_counter

MODULES = {
    "beit": beit.Beit,
    "vision_transformer_relpos": vision_transformer_relpos.VisionTransformerRelPos,
}
NAMES = sorted(name for name in timm.list_models() if _model_to_module[name] in MODULES)


@contextlib.contextmanager
def shrunk(cls):
    """Let timm's entry points build four narrow blocks on a 6x6 grid."""
    init = cls.__init__

    @functools.wraps(init)
    def small(self, *args, **kwargs):
        kwargs.update(depth=4, embed_dim=32, num_heads=2, img_size=6 * kwargs.get("patch_size", 16))
        init(self, *args, **kwargs)

    cls.__init__ = small
    try:
        yield
    finally:
        cls.__init__ = init


def build(name, **changes):
    with shrunk(MODULES[_model_to_module[name]]):
        return noisy(timm.create_model(name, num_classes=5, **changes))


def slow(model, monkeypatch):
    """The blocks' own forward, with the library's bias cut down to the rows and columns of the tokens' places."""
    is_beit = isinstance(model, beit.Beit)
    seen: list[int] = []

    def cut(get):
        def bias(self):
            return get(self)[:, :, seen][:, :, :, seen]

        return bias

    for cls, name in (
        (beit.Attention, "_get_rel_pos_bias"),
        (vision_transformer_relpos.RelPosBias, "get_bias"),
        (vision_transformer_relpos.RelPosMlp, "get_bias"),
    ):
        monkeypatch.setattr(cls, name, cut(getattr(cls, name)))

    def shared():
        if is_beit or model.shared_rel_pos is None:
            return {}
        return {"shared_rel_pos": model.shared_rel_pos.get_bias()}

    def half(block, part, x):
        hook = part.register_forward_hook(lambda m, i, o: torch.zeros_like(o))
        out = block(x, **shared())
        hook.remove()
        return out

    def after(block):
        return isinstance(block, vision_transformer_relpos.ResPostRelPosBlock)

    def attend(i, x, places):
        seen[:] = places
        block = model.blocks[i]
        return half(block, block.norm2 if after(block) else block.mlp, x)

    def mlp(i, x):
        seen[:] = range(x.shape[1])
        block = model.blocks[i]
        return half(block, block.norm1 if after(block) else block.attn, x)

    def embed(image):
        x = model.patch_embed(image)
        if model.cls_token is not None:
            x = torch.cat([model.cls_token, x], dim=1)
        return x + model.pos_embed if is_beit and model.pos_embed is not None else x

    def head(x, sizes, _):
        x, first = model.norm(x), model.num_prefix_tokens
        if model.global_pool == "token":
            return model.forward_head(x)
        weight = sizes[first:, None]
        return model.head(model.fc_norm((x[:, first:] * weight).sum(dim=1) / weight.sum()))

    return Slow(embed, attend, mlp, head, model.num_prefix_tokens, model.cls_token is not None)


@pytest.mark.parametrize("name", NAMES)
def test_wraps(name, monkeypatch):
    model = build(name)
    layout = diffrate.compress(model).backbone.layout
    images = torch.randn(2, 3, *layout.img_size)
    schedule = falling(model)
    with torch.no_grad():
        assert torch.equal(diffrate.compress(model)(images), model(images))
        got = diffrate.compress(model, schedule)(images)
        pruned = diffrate.compress(model, schedule, operation="prune")(images)
        assert not torch.allclose(got, model(images))
    for kept in (None, schedule):
        counted = []
        for count in (1, 2):
            with flop_counter() as counter:
                every_token(diffrate.compress(model, kept), images[:count])
            counted.append(counter.get_total_flops() / 2e9)
        # What one image more costs: the bias may come from an MLP, which runs once a batch.
        assert diffrate.gmacs(model, kept) == pytest.approx(counted[1] - counted[0], rel=0.03)
    check_search(model)
    spelled = slow(model, monkeypatch)
    torch.testing.assert_close(got, slow_logits(spelled, images, schedule), rtol=1e-3, atol=1e-4)
    only = diffrate.Schedule(schedule.merge, schedule.merge, schedule.prefix)
    torch.testing.assert_close(pruned, slow_logits(spelled, images, only), rtol=1e-3, atol=1e-4)
    remember("timm", name)
