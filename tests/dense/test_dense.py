"""Segmentation: the decoder, mIoU, reading scenes, training, and compression with restored grids."""

import contextlib
import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import diffrate
from backbones.slow import noisy
from backbones.test_timm_metaformer import shrunk
from conftest import check_refused, flop_counter
from diffrate.backbones import backbone_of
from diffrate.costs.macs import MacCost
from diffrate.dense import (
    SegmentationRecipe,
    Segmenter,
    build_segmenter,
    evaluate_segmenter,
    load_scenes,
    train_segmenter,
)
from diffrate.dense.camvid import CLASSES, VOID, Scenes, normalized
from diffrate.dense.choosing import choose_schedule, plateaus
from diffrate.dense.fpn import SemanticFPN
from diffrate.dense.miou import confusion, score
from diffrate.dense.training import augmented
from diffrate.searching.budget import Space

CPU = torch.device("cpu")


def small_segmenter(name):
    """A ViT of width 32 or a narrow CAFormer for 64x96 pixels: a grid of 4x6."""
    torch.manual_seed(0)
    if name == "caformer":
        with shrunk():
            return build_segmenter("caformer_s18", len(CLASSES), (64, 96), width=16)
    backbone = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=(64, 96),
        depth=4,
        embed_dim=32,
        num_heads=2,
        num_classes=0,
        global_pool="",
    )
    return Segmenter(backbone, len(CLASSES), width=16)


@pytest.fixture
def scenes_folder(tmp_path):
    """Scenes of 60x90 pixels whose colour says which class a rectangle is."""
    draw = np.random.default_rng(0)
    colours = draw.integers(0, 256, (len(CLASSES) + 1, 3), dtype=np.uint8)
    for split, count in (("train", 8), ("val", 4), ("test", 4)):
        for folder in (split, f"{split}annot"):
            (tmp_path / folder).mkdir()
        for i in range(count):
            label = np.kron(draw.integers(0, len(CLASSES) + 1, (3, 3)), np.ones((20, 30), int)).astype(
                np.uint8
            )
            Image.fromarray(colours[label]).save(tmp_path / split / f"{i}.png")
            Image.fromarray(label).save(tmp_path / f"{split}annot" / f"{i}.png")
    return tmp_path


def test_scenes(scenes_folder):
    scenes = load_scenes(scenes_folder, "val")
    assert scenes.images.shape == (4, 3, 64, 96)
    assert scenes.labels.shape == (4, 64, 96)
    assert (scenes.labels[:, 60:] == VOID).all()
    assert (scenes.labels[:, :, 90:] == VOID).all()
    original = np.asarray(Image.open(scenes_folder / "valannot" / "2.png"))
    assert (scenes.labels[2, :60, :90].numpy() == original).all()
    (scenes_folder / "valannot" / "2.png").unlink()
    with pytest.raises(diffrate.DiffRateError, match="has no labels"):
        load_scenes(scenes_folder, "val")
    with pytest.raises(diffrate.DiffRateError, match="no images"):
        load_scenes(scenes_folder, "nowhere")


def test_miou_by_hand():
    """Two classes of four pixels and one of void: IoU 2/4, 1/3, and 0 of a class that is only predicted."""
    labels = torch.tensor([0, 0, 0, 1, 1, VOID])
    predicted = torch.tensor([0, 0, 1, 1, 2, 0])
    counts = confusion(predicted, labels)
    assert counts.sum() == 5
    result = score(counts, 1, 1.0)
    assert result.iou[:3] == [pytest.approx(100 * 2 / 3, abs=0.01), pytest.approx(100 / 3, abs=0.01), 0.0]
    assert result.miou == pytest.approx(50.0)  # over the two classes that occur
    assert result.pixel_accuracy == pytest.approx(60.0)
    assert result.mean_accuracy == pytest.approx(100 * (2 / 3 + 1 / 2) / 2)


def test_fpn_is_the_sum_of_its_levels():
    """Against the formula: top-down sums of 1x1 projections, each level convolved and resized to the finest."""
    torch.manual_seed(0)
    fpn = SemanticFPN([3, 5, 7], classes=4, width=16).eval()
    maps = [torch.randn(2, 3, 12, 16), torch.randn(2, 5, 6, 8), torch.randn(2, 7, 3, 4)]

    def up(x, like):
        return torch.nn.functional.interpolate(x, like.shape[-2:], mode="bilinear")

    with torch.no_grad():
        c = fpn.lateral[2](maps[2])
        b = fpn.lateral[1](maps[1]) + up(c, maps[1])
        a = fpn.lateral[0](maps[0]) + up(b, maps[0])
        total = fpn.steps[0](a) + up(fpn.steps[1](b), a)
        total = total + up(fpn.steps[2][1](up(fpn.steps[2][0](c), b)), a)
        torch.testing.assert_close(fpn(maps), fpn.classifier(total))


def merging(model, count):
    layout = backbone_of(model.whole).layout
    n = layout.tokens
    kept = (n, n - 4, count, count)
    return diffrate.Schedule(kept, kept, layout.prefix, diffrate.Operator(operation="merge"))


@pytest.mark.parametrize("name", ["vit", "caformer"])
def test_compressed_segmenter(name):
    """The same decoder on grids in which each patch has its token's features; uncompressed bit for bit."""
    model = noisy(small_segmenter(name), std=0.1)
    images = torch.randn(2, 3, 64, 96)
    layout = backbone_of(model.whole).layout
    identity = diffrate.Schedule.identity(layout.depth, layout.tokens, layout.prefix)
    schedule = merging(model, 12)
    with torch.no_grad():
        whole = model(images)
        assert whole.shape == (2, len(CLASSES), 64, 96)
        assert torch.equal(model.compressed(identity)(images), whole)
        fast = model.compressed(schedule)
        got = fast(images)
        maps = fast.backbone.forward_intermediates(
            images, indices=model.taken, norm=name == "vit", intermediates_only=True
        )
        if name == "vit":
            traced = fast.backbone.trace(images)[-1]
            tokens = model.backbone.norm(traced.x)
            grid = torch.stack([tokens[b, traced.patches[b]] for b in range(2)])
            assert torch.equal(maps[-1], grid.transpose(1, 2).reshape(2, -1, 4, 6))
        logits = model.decoder(model.scales(maps))
        wanted = torch.nn.functional.interpolate(logits, (64, 96), mode="bilinear")
    torch.testing.assert_close(got, wanted)
    assert not torch.allclose(got, whole)
    assert fast.gmacs() < model.gmacs()
    for each in (model, fast):
        with flop_counter() as counter:
            each(images[:1])
        assert each.gmacs() == pytest.approx(counter.get_total_flops() / 2e9, rel=0.01)


def test_augmentation_moves_labels_with_pixels():
    """Images that hold their own label as a colour still do after flips, scales and crops."""
    torch.manual_seed(0)
    labels = torch.randint(0, 11, (6, 4, 6)).repeat_interleave(8, 1).repeat_interleave(8, 2)
    images = labels[:, None].float().expand(-1, 3, -1, -1)
    recipe = SegmentationRecipe(smallest_scale=0.5, largest_scale=2.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        seen, moved = augmented(images, labels, recipe, generator)
        assert seen.shape == images.shape
        assert moved.shape == labels.shape
        for image, label in zip(seen[:, 0], moved, strict=True):
            inside = label < VOID
            # Brightness and contrast are one line an image; borders are blended by the interpolation.
            x, y = label[inside].float(), image[inside]
            if x.std() > 0:
                assert torch.corrcoef(torch.stack([x, y]))[0, 1] > 0.8


def test_training_learns(scenes_folder):
    scenes = load_scenes(scenes_folder, "train")
    model = small_segmenter("vit")
    recipe = SegmentationRecipe(epochs=25, batch_size=4, lr=3e-3, backbone_lr=1.0, amp=False, warmup_epochs=2)
    before = evaluate_segmenter(model, scenes, CPU).miou
    trained = train_segmenter(model, scenes, scenes, CPU, recipe)
    assert trained.epochs == 25
    assert trained.history[-1]["loss"] < 0.7 * trained.history[0]["loss"]
    assert trained.score.miou > before + 15
    assert evaluate_segmenter(model, scenes, CPU).miou == pytest.approx(trained.score.miou)


def test_plateaus_are_on_the_budget_and_flat_at_the_end():
    backbone = backbone_of(timm.create_model("vit_tiny_patch16_224", num_classes=0, global_pool=""))
    space = Space.of(backbone, MacCost.of_backbone(backbone))
    budget = 0.75 * float(space.gmacs(torch.full_like(space.most, 197)))
    found = plateaus(space, budget)
    assert len(found) == 4
    for counts in found:
        assert float(space.gmacs(counts)) == pytest.approx(budget, rel=1e-3)
        assert (counts[1:] <= counts[:-1]).all()
        assert counts[0] == 197
        assert counts[-1] == counts[-2] == counts[-3]


def test_choosing_a_schedule_meets_the_budget():
    model = small_segmenter("vit").eval()
    scenes = Scenes(
        torch.randint(0, 256, (2, 3, 64, 96), dtype=torch.uint8), torch.randint(0, 11, (2, 64, 96)).byte()
    )
    budget = model.gmacs() - 0.3 * (model.gmacs() - model.decoder_gmacs())
    chosen = choose_schedule(model, budget, scenes, CPU)
    fast = model.compressed(chosen.schedule)
    assert 0.98 * budget <= fast.gmacs() <= budget
    assert chosen.miou == evaluate_segmenter(fast, scenes, CPU).miou >= max(chosen.others)
    assert fast(normalized(scenes.images)).shape == (2, 11, 64, 96)


@pytest.mark.parametrize("name", ["caformer_s18"])
def test_commands(name, scenes_folder, tmp_path, diffrate_cli):
    out = tmp_path / "seg"
    with shrunk() if name.startswith("caformer") else contextlib.nullcontext():
        ran = diffrate_cli(
            *("segment", "train", "--model", name, "--data-dir", scenes_folder, "-o", out, "--width", 16),
            *("--epochs", 2, "--batch-size", 4, "--device", "cpu"),
        )
        assert ran.code == 0, ran.err
        assert "mIoU" in ran.out
        results = tmp_path / "eval.json"
        ran = diffrate_cli(
            *("segment", "eval", "--from", out, "--data-dir", scenes_folder, "--budget", "97%"),
            *("--device", "cpu", "--json", results),
        )
        assert ran.code == 0, ran.err
        scores = json.loads(results.read_text())["results"]["scores"]
        assert set(scores) == {"whole", "97% of the GMACs"}
        compressed = scores["97% of the GMACs"]
        assert compressed["gmacs"] <= 0.97 * scores["whole"]["gmacs"]
        assert len(compressed["schedule"]["merge"]) == 4
        check_refused(
            diffrate_cli("segment", "eval", "--from", out, "--data-dir", scenes_folder, "--budget", "2%"),
            "cannot be met",
        )
    check_refused(
        diffrate_cli("segment", "eval", "--from", tmp_path, "--data-dir", scenes_folder), "holds no model"
    )
    check_refused(
        diffrate_cli("segment", "train", "--model", "vit_none", "--data-dir", scenes_folder, "-o", out / "x"),
        "timm knows no model",
    )
