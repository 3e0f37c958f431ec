"""Every model name that timm builds as a VisionTransformer wraps and is right, or is refused with a reason."""

import collections
import contextlib
import functools

import pytest
import timm
import torch
from timm.models import vision_transformer
from timm.models._registry import _model_to_module

import diffrate
from backbones.slow import outcomes, remember
from diffrate.backbones import backbone_of

MODULES = ("vision_transformer", "deit", "vision_transformer_hybrid")
NAMES = sorted(name for name in timm.list_models() if _model_to_module[name] in MODULES)
# What is known to have no place between attention and MLP, or attention that is not plain: refused, by block type.
REFUSED_BLOCKS = {"ParallelScalingBlock", "ParallelThingsBlock", "DiffParallelScalingBlock"}


@contextlib.contextmanager
def shrunk():
    """Let timm's entry points build four narrow blocks on a 6x6 grid: same code paths in milliseconds."""
    cls = vision_transformer.VisionTransformer
    init = cls.__init__

    @functools.wraps(init)
    def small(self, *args, **kwargs):
        kwargs["depth"] = 4
        if "embed_layer" not in kwargs:  # convolutional stems fix their own sizes
            kwargs.update(embed_dim=32, num_heads=2, img_size=6 * kwargs.get("patch_size", 16))
        init(self, *args, **kwargs)

    cls.__init__ = small
    try:
        yield
    finally:
        cls.__init__ = init


def build(name, **changes):
    with shrunk():
        model = timm.create_model(name, pretrained=False, **changes)
    torch.manual_seed(0)
    for parameter in model.parameters():  # zero-initialised heads and scales would hide a skipped layer
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def halved(model):
    layout = backbone_of(model).layout
    n, p = layout.tokens, layout.prefix
    middle, late = p + (n - p) * 3 // 4, p + (n - p) // 2
    return diffrate.Schedule((n, n, middle, late), (n, n, middle - 2, late), prefix=p)


def is_plain(model):
    """Whether a model has only standard parts, and so must wrap; every other one must be refused."""
    blocks = getattr(model, "blocks", [])
    return (
        type(model).__name__ in ("VisionTransformer", "VisionTransformerDistilled")
        and model.global_pool != "prr"
        and not {type(block).__name__ for block in blocks} & REFUSED_BLOCKS
        and {type(getattr(block, "attn", None)).__name__ for block in blocks} == {"Attention"}
    )


OTHERS = {
    "swin_tiny_patch4_window7_224": "windows",
    "swinv2_tiny_window8_256": "windows",
    "hiera_tiny_224": "mask units",
    "samvit_base_patch16_224": "windows",
    "mvitv2_tiny": "pools",
    "pvt_v2_b0": "pools",
    "pit_ti_224": "pools",
    "levit_128s": "pools",
    "cait_xxs24_224": "talking heads",
    "xcit_nano_12_p16_224": "between channels",
    "convit_tiny": "pair of grid positions",
    "crossvit_9_240": "two sequences",
    "tnt_s_patch16_224": "inner tokens",
    "volo_d1_224": "outlook",
    "visformer_tiny": "convolutions",
    "mixer_s32_224": "no attention",
    "naflexvit_base_patch16_gap": "patches of any size",
    "poolformer_s12": "no attention",
    "resnet18": "no attention",
}


@pytest.mark.parametrize("name", [name for name in OTHERS if timm.is_model(name)])
def test_other_designs_are_refused_with_the_reason(name):
    model = timm.create_model(name)
    with pytest.raises(diffrate.UnsupportedModelError, match=OTHERS[name]) as refused:
        diffrate.compress(model)
    module = _model_to_module[name]
    for same in timm.list_models():  # the reason is one of the design, which all names of a module share
        if _model_to_module[same] == module and same not in outcomes.get("timm", {}):
            remember("timm", same, str(refused.value))


@pytest.mark.parametrize("name", NAMES)
def test_wraps_or_refuses(name):
    model = build(name)
    if not is_plain(model):
        with pytest.raises(diffrate.UnsupportedModelError) as refused:
            diffrate.compress(model)
        remember("timm", name, str(refused.value))
        return
    check(model)
    remember("timm", name)


PARTS = {
    "query and key norm": {"qk_norm": True},
    "layer scale": {"init_values": 0.4, "qk_norm": True},
    "norms inside attention and MLP": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "norms after attention and MLP": {"block_fn": vision_transformer.ResPostBlock, "qk_norm": True},
    "norm before the blocks": {"pre_norm": True},
    "registers, mean-pooled": {"reg_tokens": 3, "global_pool": "avg"},
    "mean of all tokens": {"reg_tokens": 2, "global_pool": "avg", "pool_include_prefix": True},
    "no bias": {"qkv_bias": False, "proj_bias": False},
}


@pytest.mark.parametrize("parts", PARTS)
def test_parts_that_few_names_have(parts):
    check(build("vit_tiny_patch16_224", **PARTS[parts]))


def check(model):
    """Bit for bit the original where nothing is removed, and the slow forward where tokens are."""
    whole = diffrate.compress(model)
    layout = whole.backbone.layout
    images = torch.randn(2, layout.in_chans, *layout.img_size)
    schedule = halved(model)
    with torch.no_grad():
        assert torch.equal(whole(images), model(images))
        logits, tokens = diffrate.compress(model, schedule)(images, return_tokens=True)
        reference = slow_forward(model, images, schedule)
    assert tokens.x.shape[1] == schedule.merge[-1]
    torch.testing.assert_close(logits, reference, rtol=1e-3, atol=1e-4)


def slow_forward(model, images, schedule):
    """Token compression spelled out image by image from the blocks' own forward, with hooks to read q and k."""
    return torch.cat([slow_image(model, image[None], schedule) for image in images])


def slow_image(model, image, schedule):
    x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(image))))[0]
    prefix = model.num_prefix_tokens
    size = torch.ones(len(x))
    for block, prune, merge in zip(model.blocks, schedule.prune, schedule.merge, strict=True):
        # The block's own forward with its MLP silenced is x + attention, whatever norms and scales are inside.
        seen = {}
        hooks = [
            block.attn.q_norm.register_forward_hook(lambda m, i, o, seen=seen: seen.update(q=o[0])),
            block.attn.k_norm.register_forward_hook(lambda m, i, o, seen=seen: seen.update(k=o[0])),
            block.mlp.register_forward_hook(lambda m, i, o: torch.zeros_like(o)),
        ]
        if isinstance(block, vision_transformer.ResPostBlock):
            hooks.append(block.norm2.register_forward_hook(lambda m, i, o: torch.zeros_like(o)))
        bias = size.log()[None, None, None].expand(1, 1, len(x), len(x))
        attended = block(x[None], attn_mask=bias)[0]
        for hook in hooks:
            hook.remove()
        q, k = seen["q"], seen["k"]  # (heads, N, d)
        attention = (q @ k.transpose(1, 2) * block.attn.scale + bias[0]).softmax(-1).mean(0)
        scores = attention[0] if model.cls_token is not None else attention.mean(0)
        order = list(range(prefix)) + sorted(range(prefix, len(x)), key=lambda j: -scores[j].item())
        kept = order[:merge]
        members = {j: [j] for j in kept}
        new_size = {j: size[j].clone() for j in kept}
        for j in order[merge:prune]:
            similar = torch.cosine_similarity(attended[j][None], attended[kept[prefix:]])
            best = kept[prefix + int(similar.argmax())]
            members[best].append(j)
            new_size[best] += size[j] * similar.max()
        x = torch.stack([attended[members[j]].mean(0) for j in kept])
        size = torch.stack([new_size[j].clamp_min(1) for j in kept])
        x = mlp_residual(block, x[None])[0]
    return slow_head(model, model.norm(x), size)


def mlp_residual(block, x):
    hook = block.attn.register_forward_hook(lambda m, i, o: torch.zeros_like(o))
    hooks = [hook]
    if isinstance(block, vision_transformer.ResPostBlock):
        hooks.append(block.norm1.register_forward_hook(lambda m, i, o: torch.zeros_like(o)))
    out = block(x)
    for h in hooks:
        h.remove()
    return out


def slow_head(model, x, size):
    if model.global_pool == "token":
        return model.forward_head(x[None])
    first = 0 if model.pool_include_prefix else model.num_prefix_tokens
    tokens, weight = x[first:], size[first:]
    if model.global_pool == "map":
        pooled = model.attn_pool(tokens[None], attn_mask=weight.log()[None, None, None])
    elif model.global_pool == "avg":
        pooled = ((tokens * weight[:, None]).sum(0) / weight.sum())[None]
    elif model.global_pool == "":
        return model.forward_head(x[None])
    else:
        raise AssertionError(model.global_pool)
    return model.head(model.fc_norm(pooled))


ISOTROPIC = (*MODULES, "eva", "beit", "vision_transformer_relpos", "naflexvit")


def test_counts(capsys):
    """Runs last: prints, per library, how many names wrap and why the others do not."""
    seen = outcomes.get("timm", {})
    isotropic = [name for name in timm.list_models() if _model_to_module[name] in ISOTROPIC]
    if not set(isotropic) <= set(seen):
        pytest.skip("counts need the whole sweep in one process")
    with capsys.disabled():
        print()
        for library, names in outcomes.items():
            reasons = collections.Counter(reason.partition(": ")[2] for reason in names.values() if reason)
            print(
                f"{library}: {len(names)} names, {len(names) - reasons.total()} wrap, {reasons.total()} refused"
            )
            for reason, count in reasons.most_common():
                print(f"  {count:4d}  {reason}")
    assert sum(not seen[name] for name in isotropic) >= 0.9 * len(isotropic)
