"""timm's Eva models: every name wraps, with rotary positions that follow the tokens."""

import contextlib
import functools

import pytest
import timm
import torch
from timm.models import eva
from timm.models._registry import _model_to_module

import diffrate
from backbones.slow import Slow, check, check_search, falling, noisy, remember, slow_logits
from conftest import every_token, flop_counter
from diffrate.tokens import Positions

NAMES = sorted(name for name in timm.list_models() if _model_to_module[name] == "eva")


@contextlib.contextmanager
def shrunk():
    """Let timm's entry points build four narrow blocks on a 6x6 grid: same code paths in milliseconds."""
    init = eva.Eva.__init__

    @functools.wraps(init)
    def small(self, *args, **kwargs):
        if kwargs.get("num_kv_heads") is not None:
            kwargs["num_kv_heads"] = (4, 2, 2, 4)
        kwargs.update(depth=4, embed_dim=64, num_heads=4, img_size=6 * kwargs.get("patch_size", 16))
        init(self, *args, **kwargs)

    eva.Eva.__init__ = small
    try:
        yield
    finally:
        eva.Eva.__init__ = init


def build(name, **changes):
    with shrunk():
        return noisy(timm.create_model(name, **changes))


def slow(model, image_size=None):
    rope = model._pos_embed(model.patch_embed(torch.zeros(1, 3, *(image_size or size(model)))))[1]
    prefix = model.num_prefix_tokens

    def silenced(block, parts, call):
        hooks = [part.register_forward_hook(lambda m, i, o: torch.zeros_like(o)) for part in parts]
        out = call(block)
        for hook in hooks:
            hook.remove()
        return out

    def attend(i, x, places):
        here = None
        if rope is not None:
            table = rope[i] if model.rope_mixed else rope
            here = table[..., [p - prefix for p in places[prefix:]], :]
        block = model.blocks[i]
        last = block.norm2 if isinstance(block, eva.EvaBlockPostNorm) else block.mlp
        return silenced(block, [last], lambda b: b(x, rope=here))

    def mlp(i, x):
        block = model.blocks[i]
        first = block.norm1 if isinstance(block, eva.EvaBlockPostNorm) else block.attn
        return silenced(block, [first], lambda b: b(x))

    def head(x, sizes, _):
        x = model.norm(x)
        if model.global_pool == "token":
            return model.forward_head(x)
        if model.global_pool == "map":
            pooled = model.attn_pool(x, attn_mask=sizes.log()[None, None, None])
        else:
            assert model.global_pool == "avg"
            weight = sizes[prefix:, None]
            pooled = (x[:, prefix:] * weight).sum(dim=1) / weight.sum()
        return model.head(model.fc_norm(pooled))

    def embed(image):
        return model.norm_pre(model._pos_embed(model.patch_embed(image))[0])

    return Slow(embed, attend, mlp, head, prefix, model.cls_token is not None)


def size(model):
    return model.patch_embed.img_size


@pytest.mark.parametrize("name", NAMES)
def test_wraps(name):
    model = build(name)
    check(model, slow(model))
    remember("timm", name)


KINDS = {
    "EVA-02": "eva02_base_patch14_224",
    "norms after": "eva02_enormous_patch14_clip_224",
    "DINOv3": "vit_base_patch16_dinov3",
    "a table a block": "vit_base_patch16_rope_mixed_224",
    "grouped queries": "vit_base_patch16_sapiens2",
    "attention pool": "vit_pe_core_base_patch16_224",
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if timm.is_model(KINDS[kind])])
def test_searches(kind):
    check_search(build(KINDS[kind]))


@pytest.mark.parametrize("mixed", [False, True])
def test_positions_follow_tokens_on_other_grids(mixed):
    """A dynamic model on an oblong image: the reference looks every rotary row up by the token's first patch."""
    name = "vit_base_patch16_rope_mixed_224" if mixed else "vit_base_patch16_dinov3"
    model = build(name, dynamic_img_size=True)
    fast = diffrate.compress(model, falling(model))
    images = torch.randn(2, 3, 64, 112)
    reference = slow_logits(
        slow(model, (64, 112)), images, fast.schedule.resized(28 + model.num_prefix_tokens)
    )
    with torch.no_grad():
        torch.testing.assert_close(fast(images), reference, rtol=1e-3, atol=1e-4)


def test_positions_are_those_of_the_target():
    """What a token's index says is the input token that its merge targets began as."""
    model = build("vit_base_patch16_rope_224")
    fast = diffrate.compress(model, falling(model))
    tokens = fast.forward_tokens(torch.randn(2, 3, *size(model)), patches=True)
    assert isinstance(tokens.positions, Positions)
    index = tokens.positions.index
    assert index.shape == (2, fast.schedule.merge[-1])
    assert (index[:, 0] == 0).all()
    for b in range(2):
        assert len(set(index[b].tolist())) == index.shape[1]
        for place, patch in enumerate(index[b, 1:].tolist(), start=1):
            assert tokens.patches[b, patch - 1] == place  # the patch it sits on is one that it stands for


@pytest.mark.parametrize("kind", [kind for kind in KINDS if timm.is_model(KINDS[kind])])
def test_macs_are_those_of_the_counter(kind):
    model = build(KINDS[kind]).requires_grad_(False)  # the counter follows gradients
    for kept in (None, falling(model)):
        with flop_counter() as counter:
            every_token(diffrate.compress(model, kept), torch.zeros(1, 3, *size(model)))
        assert diffrate.gmacs(model, kept) == pytest.approx(counter.get_total_flops() / 2e9, rel=0.01)
