"""Models built on torch's nn.MultiheadAttention: torchvision's ViT and OpenCLIP's towers."""

import pytest
import torch
from torchvision.models import list_models, vision_transformer

import diffrate
from backbones.slow import Slow, check, check_search, falling, noisy, remember, slow_logits, spelled_out
from conftest import every_token, flop_counter


@pytest.fixture(autouse=True)
def formula_visible():
    """The native kernel of eval mode would bypass the attention that the reference spells out."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def torchvision_model(**changes):
    arguments = {"image_size": 48, "patch_size": 8, "num_layers": 4, "num_heads": 2, "hidden_dim": 32}
    return noisy(vision_transformer.VisionTransformer(**arguments, mlp_dim=48, num_classes=5, **changes))


def slow_torchvision(model):
    def attend(i, x, places):
        block = model.encoder.layers[i]
        normed = block.ln_1(x)
        return x + block.self_attention(normed, normed, normed, need_weights=False)[0]

    def mlp(i, x):
        block = model.encoder.layers[i]
        return x + block.mlp(block.ln_2(x))

    def embed(image):
        x = torch.cat([model.class_token, model._process_input(image)], dim=1)
        return x + model.encoder.pos_embedding

    def head(x, sizes, _):
        return model.heads(model.encoder.ln(x)[:, 0])

    return Slow(embed, attend, mlp, head, 1, True)


STEM = [vision_transformer.ConvStemConfig(8, 3, 2), vision_transformer.ConvStemConfig(16, 3, 2)]
KINDS = {
    "plain": {},
    "hidden layer": {"representation_size": 7},
    "conv stem": {"conv_stem_configs": [*STEM, vision_transformer.ConvStemConfig(24, 3, 2)]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_torchvision(kind):
    model = torchvision_model(**KINDS[kind])
    check(model, slow_torchvision(model))
    check_search(model)
    counted(model)
    for name in list_models(module=vision_transformer):
        remember("torchvision", name)


def test_torchvision_untouched_under_the_native_kernel():
    torch.backends.mha.set_fastpath_enabled(True)
    model = torchvision_model()
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        assert torch.equal(diffrate.compress(model)(images), model(images))


def counted(model):
    for kept in (None, falling(model)):
        with flop_counter() as counter:
            every_token(diffrate.compress(model, kept), torch.zeros(1, 3, 48, 48))
        assert diffrate.gmacs(model, kept) == pytest.approx(counter.get_total_flops() / 2e9, rel=0.01)


TOWERS = {
    "class token": {},
    "mean": {"pool_type": "avg"},
    "mean, norm after": {"pool_type": "avg", "final_ln_after_pool": True},
    "layer scale, no first norm": {"ls_init_value": 0.3, "no_ln_pre": True},
    "attentional pooler": {"attentional_pool": True, "attn_pooler_queries": 3, "attn_pooler_heads": 2},
    "with tokens": {"output_tokens": True},
}


def openclip_tower(**changes):
    transformer = pytest.importorskip("open_clip.transformer", reason="needs diffrate[openclip]")
    arguments = {"image_size": 48, "patch_size": 8, "width": 32, "layers": 4, "heads": 2, "mlp_ratio": 2.0}
    return noisy(transformer.VisionTransformer(**arguments, output_dim=12, **changes))


def slow_openclip(tower):
    blocks = tower.transformer.resblocks

    def attend(i, x, places):
        return x + blocks[i].ls_1(blocks[i].attention(blocks[i].ln_1(x)))

    def mlp(i, x):
        return x + blocks[i].ls_2(blocks[i].mlp(blocks[i].ln_2(x)))

    def head(x, sizes, _):
        if tower.attn_pool is not None:
            with spelled_out(sizes):  # the pooler's own attention, with log(size) on its keys
                pooled = tower.ln_post(tower.attn_pool(x))[:, 0]
        elif tower.pool_type == "tok":
            pooled = tower.ln_post(x)[:, 0]
        else:
            x = x if tower.final_ln_after_pool else tower.ln_post(x)
            pooled = (x[:, 1:] * sizes[1:, None]).sum(dim=1) / sizes[1:].sum()
            pooled = tower.ln_post(pooled) if tower.final_ln_after_pool else pooled
        return pooled @ tower.proj

    return Slow(tower._embeds, attend, mlp, head, 1, True)


@pytest.mark.parametrize("kind", TOWERS)
def test_openclip(kind):
    tower = openclip_tower(**TOWERS[kind])
    if kind != "with tokens":
        check(tower, slow_openclip(tower))
        check_search(tower)
        counted(tower)
        return
    images = torch.randn(2, 3, 48, 48)
    schedule = falling(tower)
    with torch.no_grad():
        for got, wanted in zip(diffrate.compress(tower)(images), tower(images), strict=True):
            assert torch.equal(got, wanted)
        pooled, rest = diffrate.compress(tower, schedule)(images)
    torch.testing.assert_close(
        pooled, slow_logits(slow_openclip(tower), images, schedule), rtol=1e-3, atol=1e-4
    )
    assert rest.shape[1] == schedule.merge[-1] - 1


@pytest.mark.slow
def test_openclip_names():
    """Every configuration that OpenCLIP ships, without weights: towers wrap, or are refused with a reason."""
    open_clip = pytest.importorskip("open_clip", reason="needs diffrate[openclip]")
    for name in open_clip.list_models():
        config = open_clip.get_model_config(name)["vision_cfg"]
        if "timm_model_name" in config:
            remember("open_clip", name, "a timm model: compress model.visual.trunk")
            continue
        shallow = {"layers": 2} if isinstance(config["layers"], int) else {}  # a ResNet has four numbers
        with torch.device("meta"):
            tower = open_clip.model._build_vision_tower(64, config | shallow)
        try:
            diffrate.compress(tower)
        except diffrate.UnsupportedModelError as refused:
            remember("open_clip", name, str(refused))
        else:
            remember("open_clip", name)


def test_openclip_whole_models_are_refused_by_naming_their_tower():
    open_clip = pytest.importorskip("open_clip", reason="needs diffrate[openclip]")
    vision = {"image_size": 48, "patch_size": 8, "width": 64, "layers": 4, "head_width": 32}
    text = {"context_length": 8, "vocab_size": 50, "width": 16, "heads": 1, "layers": 1}
    clip = noisy(open_clip.CLIP(12, vision, text))
    with pytest.raises(diffrate.UnsupportedModelError, match=r"model\.visual"):
        diffrate.compress(clip)
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        before = clip.encode_image(images)
        clip.visual = diffrate.compress(clip.visual, falling(clip.visual))
        after = clip.encode_image(images)
    assert after.shape == before.shape
    assert not torch.equal(after, before)
