"""Hugging Face transformers: the library's own layers and heads, spelled out, against compressed models."""

import warnings

import pytest
import torch

import diffrate
from backbones.slow import Slow, check, check_search, falling, noisy, remember, slow_logits, tensor_of
from conftest import flop_counter
from diffrate.backbones import backbone_of

transformers = pytest.importorskip("transformers", reason="needs diffrate[hf]")

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": 48,
    "patch_size": 8,
}
DINO = {key: value for key, value in SMALL.items() if key != "intermediate_size"}
NAMES = {
    "ViTModel": SMALL,
    "ViTForImageClassification": SMALL,
    "DeiTModel": SMALL,
    "DeiTForImageClassification": SMALL,
    "DeiTForImageClassificationWithTeacher": SMALL,
    "Dinov2Model": DINO | {"use_swiglu_ffn": True},
    "Dinov2ForImageClassification": DINO,
    "Dinov2WithRegistersModel": DINO,
    "Dinov2WithRegistersForImageClassification": DINO | {"num_register_tokens": 3},
    "DINOv3ViTModel": SMALL | {"use_gated_mlp": True, "num_register_tokens": 2},
    "CLIPVisionModel": SMALL,
    "CLIPVisionModelWithProjection": SMALL | {"projection_dim": 12},
    "CLIPForImageClassification": SMALL,
    "SiglipVisionModel": SMALL,
    "SiglipForImageClassification": SMALL,
}
INSIDE_JOINT = {
    "CLIPForImageClassification",
    "SiglipForImageClassification",
}  # configured through vision_config


def build(name, **changes):
    model_class = getattr(transformers, name)
    arguments = NAMES[name] | changes
    if name in INSIDE_JOINT:
        config = model_class.config_class(vision_config=arguments, num_labels=5)
    else:
        config = model_class.config_class(**arguments, num_labels=5)
    return noisy(model_class(config))


def slow(model):
    """The layers' own forward with one half silenced, and the heads as the library's documentation gives them."""
    backbone = backbone_of(model)
    name, tower = type(model).__name__, backbone.tower
    layers = backbone.layers
    prefix = backbone.layout.prefix
    rope = getattr(tower, "rope_embeddings", None)

    def silenced(layer, part, **more):
        def run(x):
            def silence(module, inputs, output):
                if isinstance(output, tuple):
                    return (torch.zeros_like(output[0]), *output[1:])
                return torch.zeros_like(output)

            hook = part.register_forward_hook(silence)
            out = layer(x, attention_mask=None, **more)
            hook.remove()
            return out

        return run

    def angles(places):
        if rope is None:
            return {}
        cos, sin = rope(torch.zeros(1, 3, 48, 48))
        here = [place - prefix for place in places[prefix:]]
        return {"position_embeddings": (cos[here], sin[here])}

    def attend(i, x, places):
        return silenced(layers[i], layers[i].mlp, **angles(places))(x)

    def mlp(i, x):
        attention = getattr(layers[i], "attention", None) or layers[i].self_attn
        return silenced(layers[i], attention, **angles(range(x.shape[1])))(x)

    def embed(image):
        x = tower.embeddings(image)
        return tower.pre_layrnorm(x) if name.startswith("CLIP") else x

    def head(x, sizes, _):
        norms = [getattr(tower, part, None) for part in ("layernorm", "norm", "post_layernorm")]
        norm = next(part for part in norms if part is not None)
        x = x if name.startswith("CLIP") else norm(x)
        weight = sizes[prefix:, None] / sizes[prefix:].sum()
        mean = (x[:, prefix:] * weight).sum(dim=1)
        if name in ("ViTForImageClassification", "DeiTForImageClassification"):
            return model.classifier(x[:, 0])
        if name == "DeiTForImageClassificationWithTeacher":
            return (model.cls_classifier(x[:, 0]) + model.distillation_classifier(x[:, 1])) / 2
        if name in ("ViTModel", "DeiTModel"):
            return model.pooler(x)
        if name in ("Dinov2Model", "Dinov2WithRegistersModel", "DINOv3ViTModel"):
            return x[:, 0]
        if name.startswith("Dinov2"):
            return model.classifier(torch.cat([x[:, 0], mean], dim=1))
        if name == "CLIPVisionModel":
            return norm(x[:, 0])
        if name == "CLIPVisionModelWithProjection":
            return model.visual_projection(norm(x[:, 0]))
        if name == "SiglipVisionModel":
            return attention_pool(model.head, x, sizes)
        return model.classifier(mean)

    return Slow(embed, attend, mlp, head, prefix, prefix > 0)


def attention_pool(pool, x, sizes):
    """SigLIP's head from its weights: one query, log(size) added to the logits of each key."""
    wq, wk, wv = pool.attention.in_proj_weight.chunk(3)
    bq, bk, bv = pool.attention.in_proj_bias.chunk(3)
    heads = pool.attention.num_heads
    q, k, v = pool.probe[0] @ wq.T + bq, x[0] @ wk.T + bk, x[0] @ wv.T + bv
    out = []
    for qh, kh, vh in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True):
        logits = qh @ kh.T / qh.shape[-1] ** 0.5 + sizes.log()
        out.append(logits.softmax(dim=-1) @ vh)
    y = pool.attention.out_proj(torch.cat(out, dim=-1))
    return y + pool.mlp(pool.layernorm(y))


@pytest.mark.parametrize("name", NAMES)
def test_wraps_and_keeps_the_output_class(name):
    model = build(name)
    fast = check(model, slow(model))
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        whole, original = diffrate.compress(model)(pixel_values=images), model(pixel_values=images)
        out, tokens = fast(pixel_values=images, return_tokens=True)
    assert type(out) is type(whole) is type(original)
    assert list(whole.keys()) == list(original.keys())
    for one, other in zip(whole.to_tuple(), original.to_tuple(), strict=True):
        assert torch.equal(one, other)
    if "last_hidden_state" in out:
        assert torch.equal(out.last_hidden_state, tokens.x)
    assert tokens.x.shape[1] == fast.schedule.merge[-1] == tokens.size.shape[1]
    assert tokens.patches.shape == (2, 36)
    remember("transformers", name)


@pytest.mark.parametrize("name", NAMES)
def test_searches(name):
    check_search(build(name))


@pytest.mark.parametrize("name", NAMES)
def test_macs_are_those_of_the_counter(name):
    model = build(name, hidden_size=64)
    schedule = falling(model)
    for kept in (None, schedule):
        with flop_counter() as counter:
            diffrate.compress(model, kept)(torch.zeros(1, 3, 48, 48))
        assert diffrate.gmacs(model, kept) == pytest.approx(counter.get_total_flops() / 2e9, rel=0.01)


@pytest.mark.parametrize(
    "name", ["ViTModel", "Dinov2Model", "CLIPVisionModel", "SiglipVisionModel", "DINOv3ViTModel"]
)
def test_hidden_states(name):
    """All of them, as the original counts them; under a schedule, the tokens that left each block."""
    model = build(name)
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        wanted = model(images, output_hidden_states=True).hidden_states
        got = diffrate.compress(model)(images, output_hidden_states=True).hidden_states
        fast = diffrate.compress(model, falling(model))
        left = fast(images, output_hidden_states=True).hidden_states
        traced = fast.trace(images)
    assert len(got) == len(wanted) == 5
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
    assert [x.shape[1] for x in left[1:]] == list(fast.schedule.merge)
    for one, tokens in zip(left[1:], traced, strict=True):
        assert torch.equal(one, tokens.x)
        assert tokens.patches.amax() < tokens.count  # every patch has a token or a stand-in


def test_loss_tuples_and_other_arguments():
    model = build("ViTForImageClassification")
    images, labels = torch.randn(2, 3, 48, 48), torch.tensor([1, 4])
    whole = diffrate.compress(model)
    with torch.no_grad():
        original = model(images, labels=labels)
        assert torch.equal(whole(images, labels=labels).loss, original.loss)
        as_tuple = whole(images, labels=labels, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[1], original.logits)
    assert whole.config is model.config
    with pytest.raises(diffrate.DiffRateError, match="output_attentions"):
        whole(images, output_attentions=True)
    assert set(whole.state_dict()) == set(model.state_dict())


@pytest.mark.parametrize("name", ["ViTModel", "Dinov2Model", "CLIPVisionModel", "SiglipVisionModel"])
def test_other_image_sizes(name):
    """32x64 pixels instead of 48x48: interpolated as the library does, with the schedule in proportion."""
    model = build(name)
    images = torch.randn(2, 3, 32, 64)
    asked = {} if name == "Dinov2Model" else {"interpolate_pos_encoding": True}
    fast = diffrate.compress(model, falling(model))
    with torch.no_grad():
        whole = diffrate.compress(model)(images, **asked)
        assert torch.equal(tensor_of(whole), tensor_of(model(images, **asked)))
        got = tensor_of(fast(images, **asked))
    reference = slow(model)
    reference.embed = backbone_of(model).embed
    schedule = fast.schedule.resized(32 + reference.prefix)
    torch.testing.assert_close(got, slow_logits(reference, images, schedule), rtol=1e-3, atol=1e-4)
    if asked:
        with pytest.raises(diffrate.DiffRateError, match="interpolate_pos_encoding"):
            fast(images)


ATTENDED = [
    "ViTForImageClassification",
    "Dinov2Model",
    "DINOv3ViTModel",
    "CLIPVisionModel",
    "SiglipVisionModel",
]


@pytest.fixture
def sharper():
    """An attention function of a user's own, registered with the library: twice as sharp; and its calls."""
    calls = []

    def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
        calls.append((module, attention_mask, query.shape[2]))
        logits = 2 * (
            query @ key.transpose(2, 3) * scaling + (0 if attention_mask is None else attention_mask)
        )
        return (logits.softmax(dim=-1) @ value).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("sharper", attention)
    yield calls
    transformers.AttentionInterface._global_mapping.pop("sharper")


@pytest.mark.parametrize("name", ATTENDED)
def test_attention_is_what_the_model_is_set_to(name, sharper):
    """eager gives sdpa's numbers without calling it; a registered function runs in every block, sizes in its mask."""
    model = build(name)
    images = torch.randn(2, 3, 48, 48)
    fast = diffrate.compress(model, falling(model))
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        by_sdpa, whole = tensor_of(fast(images)), tensor_of(model(images))
        model.set_attn_implementation("eager")
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(torch.nn.functional, "scaled_dot_product_attention")
            by_eager = tensor_of(fast.forward_tokens(images).x)
        torch.testing.assert_close(tensor_of(fast(images)), by_sdpa, rtol=1e-4, atol=1e-5)
        assert backbone_of(model).tower.config._attn_implementation == "eager"  # left as it was set
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(by_eager, fast.forward_tokens(images).x, rtol=1e-3, atol=1e-4)

        model.set_attn_implementation("sharper")
        other = tensor_of(diffrate.compress(model)(images))
        assert torch.equal(other, tensor_of(model(images)))
        assert not torch.allclose(other, whole, atol=1e-3)
        sharper.clear()
        tokens = fast.forward_tokens(images)
    modules = [module for module, _, _ in sharper]
    assert len(modules) == len(set(modules)) == 4
    masks = [mask for _, mask, _ in sharper]
    assert masks[:3] == [None] * 3  # nothing was merged yet
    kept = fast.schedule.merge[2]
    assert masks[3].shape == (2, 1, kept, kept)
    sizes = masks[3].exp()[:, 0]
    assert torch.equal(sizes[:, 0], sizes[:, -1])  # of keys, the same for every query
    assert sizes.max() > 1
    assert sizes[:, 0, : tokens.prefix].eq(1).all()


@pytest.mark.parametrize("name", ATTENDED[:-1])
def test_a_registered_function_gives_what_the_blocks_themselves_give(name, sharper):
    """Where tokens are pruned no sizes grow: the library's own layers on the tokens that are left say the same."""
    model = build(name)
    model.set_attn_implementation("sharper")
    n, prefix = backbone_of(model).layout.tokens, backbone_of(model).layout.prefix
    kept = (n, n, n - 9, n - 9)
    fast = diffrate.compress(
        model, diffrate.Schedule(kept, kept, prefix, diffrate.Operator(operation="prune"))
    )
    images = torch.randn(1, 3, 48, 48)
    reference = slow(model)
    with torch.no_grad():
        before, after = fast.trace(images)[1:3]
        places = list(range(n))
        for patch, token in enumerate(after.patches[0].tolist()):
            if token >= 0:
                places[token] = patch + prefix
        attended = reference.attend(2, before.x, list(range(n)))
        wanted = reference.mlp(2, attended[:, places[: after.count]])
    torch.testing.assert_close(after.x, wanted, rtol=1e-4, atol=1e-4)


def test_flash_attention_is_left_where_sizes_come_in(monkeypatch):
    """It has no place for a bias of keys: before a merge it runs, after one torch's attention does."""
    model = build("ViTModel")
    by_sdpa = diffrate.compress(model, falling(model))
    images = torch.randn(2, 3, 48, 48)
    calls = []

    def flash(module, query, key, value, attention_mask, scaling=None, **_):
        assert attention_mask is None
        calls.append(query.shape[2])
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling)
        return mixed.transpose(1, 2).contiguous(), None

    with torch.no_grad():
        wanted = by_sdpa(images).last_hidden_state
        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_attention_2", flash)
        monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
        got = by_sdpa(images).last_hidden_state
    assert calls == [37, 37, 37]
    torch.testing.assert_close(got, wanted)


def test_a_tower_inside_a_larger_model():
    """What a vision-language user does: compress the tower of a CLIP, and map its tokens back to patches."""
    config = transformers.CLIPConfig(
        vision_config=SMALL, text_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    )
    clip = noisy(transformers.CLIPModel(config))
    with pytest.raises(diffrate.UnsupportedModelError, match="vision_model"):
        diffrate.compress(clip)
    fast = diffrate.compress(clip.vision_model, falling(clip.vision_model))
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        out, tokens = fast(images, return_tokens=True)
        grid = diffrate.restore(out.last_hidden_state, tokens.patches)
        before = clip.get_image_features(images)
        clip.vision_model = fast
        features = clip.get_image_features(images)
    assert grid.shape == (2, 36, 32)
    pooled = features if isinstance(features, torch.Tensor) else features.pooler_output
    torch.testing.assert_close(pooled, clip.visual_projection(out.pooler_output))
    whole = before if isinstance(before, torch.Tensor) else before.pooler_output
    assert not torch.equal(pooled, whole)


@pytest.mark.slow
def test_every_image_classifier_wraps_or_is_refused_with_a_reason():
    """All of the library's classes for image classification, without weights: nothing else may come of them."""
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
    names = [name for entry in mapping.values() for name in ([entry] if isinstance(entry, str) else entry)]
    wrapped = 0
    for name in names:
        model_class = getattr(transformers, name)
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = model_class(model_class.config_class())
        except Exception:  # needs a package that is not here, or a configuration of its own
            continue
        try:
            diffrate.compress(model)
        except diffrate.UnsupportedModelError as refused:
            remember("transformers", name, str(refused))
        else:
            assert name in NAMES, f"{name} wraps, but nothing checks it"
            wrapped += 1
    assert wrapped == sum("ForImageClassification" in name for name in NAMES)
