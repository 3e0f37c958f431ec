"""Images cut into patches by a product: what a convolution would give, and only where it is one of patches."""

import pytest
import torch
import torch.nn.functional as F

import diffrate
from conftest import random_vit
from diffrate import Schedule, kernels, methods
from diffrate.kernels import patches
from diffrate.models import load_model

SCHEDULE = Schedule([17, 15, 12, 6], [17, 12, 12, 3])
HALF = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", True)


@pytest.fixture
def products(monkeypatch):
    """Counts the products that stood in for a convolution."""
    counted = []
    project = patches.project
    monkeypatch.setattr(patches, "project", lambda *given: counted.append(1) or project(*given))
    return counted


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("window", [(8, 8), (4, 16), (32, 32), (1, 2)])
@pytest.mark.parametrize("biased", [True, False])
def test_the_product_is_the_convolution(images, dtype, window, biased, products):
    torch.manual_seed(0)
    conv, images = torch.nn.Conv2d(3, 20, window, window, bias=biased).to(dtype), images.to(dtype)
    with patches.PatchProducts(), torch.no_grad():
        found = conv(images)
    assert len(products) == 1
    with torch.no_grad():
        wanted = conv.double()(images.double())
    assert found.shape == wanted.shape
    assert found.flatten(2).transpose(1, 2).is_contiguous()  # as models read it: token by token
    assert (found - wanted).norm() / wanted.norm() < (1e-3 if dtype == torch.float16 else 8e-3)


@pytest.mark.parametrize(
    ("shape", "others"),
    [
        ((6, 3, 8, 8), {"stride": 4}),
        ((6, 3, 8, 8), {"stride": (8, 4)}),
        ((6, 3, 8, 8), {"stride": 8, "padding": 1}),
        ((6, 3, 7, 7), {"padding": "same"}),
        ((6, 3, 4, 4), {"stride": 4, "dilation": 2}),
        ((6, 1, 8, 8), {"stride": 8, "groups": 3}),
        ((6, 3, 1, 1), {}),
        ((6, 3, 5, 5), {"stride": 5}),  # 32 pixels are not whole patches: the last two are left out
    ],
)
def test_other_convolutions_stay(images, shape, others, products):
    weight = torch.randn(shape, dtype=torch.bfloat16)
    images = images.bfloat16()
    conv = torch.nn.Conv2d(3, 6, shape[-2:], **others, bias=False).bfloat16()
    conv.weight.data = weight
    with torch.no_grad():
        wanted = conv(images)
        with patches.PatchProducts():
            assert torch.equal(conv(images), wanted)
            assert torch.equal(F.conv2d(images, weight, **others), wanted)
    assert not products


def test_features_of_a_stem_stay(products):
    conv = torch.nn.Conv2d(16, 6, 4, 4).bfloat16()
    features = torch.randn(2, 16, 8, 8, dtype=torch.bfloat16)
    with torch.no_grad(), patches.PatchProducts():
        assert conv(features).shape == (2, 6, 2, 2)
        assert F.conv2d(features, conv.weight).shape == (2, 6, 5, 5)
    assert not products


def test_double_precision_stays_under_autocast(images, products):
    conv = torch.nn.Conv2d(3, 6, 8, 8).double()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), patches.PatchProducts():
        assert conv(images.double()).dtype == torch.float64
    assert not products


@pytest.mark.parametrize("name", ["tome", "evit"])
def test_rivals_have_it_too(images, name, products):
    vit = random_vit(patch_size=8, depth=4)
    rival = methods.build(name, vit, 0.8 * diffrate.gmacs(vit))
    rival.bfloat16()
    with torch.no_grad():
        rival._start(images.bfloat16())
    assert len(products) == 1


def test_single_precision_stays(images, products):
    model = diffrate.compress(random_vit(patch_size=8, depth=4), SCHEDULE)
    with torch.no_grad():
        assert torch.equal(model._start(images).x, model.backbone.start(images).x)
    assert not products


def test_under_autocast(images, products):
    model = diffrate.compress(random_vit(patch_size=8, depth=4), SCHEDULE)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = model._start(images).x
    assert len(products) == 1
    with torch.no_grad():
        torch.testing.assert_close(found, model.backbone.start(images).x, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("dtype", HALF)
def test_a_compressed_model_takes_it_and_the_uncompressed_one_does_not(images, dtype, products):
    whole, images = random_vit(patch_size=8, depth=4).to(dtype), images.to(dtype)
    model = diffrate.compress(whole, SCHEDULE)
    with torch.no_grad():
        wanted = model.backbone.start(images).x
        found = model._start(images).x
        assert len(products) == 1
        torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.02)
        assert torch.equal(diffrate.compress(whole)._start(images).x, wanted)
        with kernels.using("plain"):
            assert torch.equal(model._start(images).x, wanted)
    assert len(products) == 1


def small_torchvision():
    vit = pytest.importorskip("torchvision.models.vision_transformer")
    return vit.VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=48)


def small_transformers():
    transformers = pytest.importorskip("transformers", reason="needs diffrate[hf]")
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    return transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **shape))


def small_eva():
    return load_model("eva02_tiny_patch14_224", img_size=32, model_kwargs={"patch_size": 8, "depth": 2})


@pytest.mark.parametrize("build", [small_torchvision, small_transformers, small_eva])
def test_models_of_other_kinds(images, build, products):
    whole = build().eval().bfloat16()
    model, images = diffrate.compress(whole, Schedule([17, 9], [17, 9])), images.bfloat16()
    with torch.no_grad():
        found, wanted = model._start(images).x, model.backbone.start(images).x
    assert len(products) == 1
    torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.02)


def test_gradients(images, products):
    whole = random_vit(patch_size=8, depth=4)
    model, found = diffrate.compress(whole, SCHEDULE), []
    for path in ("auto", "plain"):
        whole.zero_grad()
        with kernels.using(path), torch.autocast("cpu", torch.bfloat16):
            x = model._start(images).x
        x.float().square().mean().backward()
        found.append(whole.patch_embed.proj.weight.grad.clone())
    assert len(products) == 1
    assert (found[0] - found[1]).norm() < 0.02 * found[1].norm()


def test_compiled_and_exported_in_one_piece(images):
    class Start(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, images):
            return self.model._start(images).x

    start = Start(diffrate.compress(random_vit(patch_size=8, depth=4).bfloat16(), SCHEDULE)).eval()
    images = images.bfloat16()
    with torch.no_grad():
        wanted = start(images)
        compiled = torch.compile(start, fullgraph=True, backend="eager")
        assert torch.equal(compiled(images), wanted)
        exported = torch.export.export(start, (images,))
        assert "conv2d" not in exported.graph_module.code
        assert torch.equal(exported.module()(images), wanted)
