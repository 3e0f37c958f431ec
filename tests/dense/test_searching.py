"""The search for segmentation models: its measurements against separate models, and what it finds."""

import json
import math

import pytest
import torch
from PIL import Image

import diffrate
from backbones.slow import noisy
from backbones.test_timm_metaformer import shrunk
from conftest import check_refused
from dense.test_dense import scenes_folder, small_segmenter  # noqa: F401  # a fixture
from diffrate.compressed import checked_operator
from diffrate.costs.macs import MacCost
from diffrate.dense import Scenes, build_segmenter, load_scenes, search_segmenter
from diffrate.dense.camvid import CLASSES, VOID, normalized
from diffrate.dense.searching import OPERATOR, SceneImages, SegmenterSubject
from diffrate.searching import search
from diffrate.searching.budget import Space
from diffrate.training.checkpoint import save_weights


def noisy_scenes(count=18):
    """Random scenes without labels."""
    torch.manual_seed(1)
    images = torch.randint(0, 256, (count, 3, 64, 96), dtype=torch.uint8)
    return Scenes(images, torch.full((count, 64, 96), VOID, dtype=torch.uint8))


CASES = {  # the last block is left alone, and has no count of its own
    "vit": ([25, 20, 16], [25, 23, 12]),
    "a plateau that falls": ([25, 20, 20], [25, 14, 17]),
    "caformer": ([24, 20, 16], [24, 22, 12]),
}


@pytest.mark.parametrize("name", CASES)
def test_variants_equal_separate_models(name):
    model = noisy(small_segmenter("caformer" if name == "caformer" else "vit"), std=0.1)
    subject = SegmenterSubject(model)
    kept, changed = CASES[name]
    operator = checked_operator(OPERATOR, subject.backbone.layout)
    images = torch.randn(2, 3, 64, 96)
    schedules = []
    for variant in range(4):
        counts = [changed[i] if i + 1 == variant else n for i, n in enumerate(kept)]
        counts.append(counts[-1])
        schedules.append(
            diffrate.Schedule(counts, counts, subject.backbone.layout.prefix, operator).effective
        )
    with torch.no_grad():
        got = subject.under_many(schedules, images)
        assert got.shape == (4, 2, 16 * 24, len(CLASSES))
        for variant, schedule in enumerate(schedules):
            fast = model.compressed(schedule)
            maps = fast.backbone.forward_intermediates(
                images, indices=model.taken, norm=name != "caformer", intermediates_only=True
            )
            logits = model.decoder(model.scales(maps))
            wanted = torch.stack([logits[:, c].flatten(1) for c in range(len(CLASSES))], dim=-1)
            torch.testing.assert_close(got[variant], wanted, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(subject.under(schedule)(images), wanted, rtol=1e-4, atol=1e-4)


def test_divergence_is_the_mean_over_pixels():
    subject = SegmenterSubject(small_segmenter("vit"))
    teacher, student = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    wanted = []
    for image in range(2):
        total = 0.0
        for pixel in range(3):
            p, q = (x[image, pixel].double().softmax(0).tolist() for x in (teacher, student))
            total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        wanted.append(total / 3)
    assert subject.divergence(teacher, student).tolist() == pytest.approx(wanted, rel=1e-4)


def test_scenes_are_normalized_and_half_are_mirrored():
    scenes = noisy_scenes(4)
    plain, flipped = SceneImages(scenes, flips=False), SceneImages(scenes, flips=True)
    wanted = normalized(scenes.images)
    assert all(torch.equal(plain[i], wanted[i]) for i in range(4))
    torch.manual_seed(0)
    mirrored = [torch.equal(flipped[i % 4], wanted[i % 4].flip(-1)) for i in range(100)]
    assert 30 < sum(mirrored) < 70


@pytest.mark.parametrize("name", ["vit", "caformer"])
def test_search_meets_the_budget_of_the_whole_model(name):
    model = noisy(small_segmenter(name), std=0.1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    # Half of what no schedule can do without, and of what all tokens cost.
    least = SegmenterSubject(model).cost().price_of_kept([model_tokens(model), 2, 2, 2])["gmacs"]
    budget = (least + model.gmacs()) / 2
    result = search_segmenter(model, noisy_scenes(), budget, steps=4, batch_size=2, progress=False)
    schedule = result.schedule
    fast = model.compressed(schedule)
    assert 0.95 * budget < fast.gmacs() <= budget
    assert schedule.cost["gmacs"] == pytest.approx(fast.gmacs())
    assert schedule.merge[-1] == schedule.merge[-2]  # the decoder's last tokens
    assert len(result.history) == 4
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def model_tokens(model):
    return SegmenterSubject(model).backbone.layout.tokens


def test_costs_hold_the_decoder():
    model = small_segmenter("vit")
    cost = SegmenterSubject(model).cost()
    assert cost.price_of(None)["gmacs"] == pytest.approx(model.gmacs())
    alone = MacCost.of(model.whole).of_schedule(None)
    assert cost.price_of(None)["gmacs"] == pytest.approx(alone + model.decoder_gmacs())


def test_starts_hold_stairs_behind_what_the_decoder_reads():
    """Twelve blocks, read after 2, 5, 8 and 11: tokens go in block 1, 3, 6 and 9, by one factor."""
    torch.manual_seed(0)
    subject = SegmenterSubject(build_segmenter("vit_tiny_patch16_224", len(CLASSES), (64, 96), width=16))
    space = Space.of(subject.backbone, subject.cost())
    budget = 0.9 * subject.model.gmacs()
    stairs = subject.starts(space, budget)[-1]
    assert float(space.gmacs(stairs)) == pytest.approx(budget, rel=1e-6)
    image = (stairs - 1).tolist()
    assert image[0] == 24
    assert image[1] == image[2]
    assert image[3] == image[4] == image[5]
    assert image[6] == image[7] == image[8]
    assert image[9] == image[10]
    factor = image[1] / 24
    assert [image[b] for b in (3, 6, 9)] == pytest.approx([24 * factor**k for k in (2, 3, 4)])
    assert len(SegmenterSubject(small_segmenter("caformer")).starts(space, budget)) == 4  # of those alone


@pytest.mark.slow
def test_search_improves_on_its_start():
    """From a start that keeps next to nothing in the end, tokens move to where the decoder misses them."""
    model = noisy(small_segmenter("vit"), std=0.3)
    subject = SegmenterSubject(model)
    scenes = noisy_scenes(40)
    images = normalized(scenes.images)
    operator = checked_operator(OPERATOR, subject.backbone.layout)
    start = diffrate.Schedule([25, 22, 4, 4], [25, 22, 4, 4], 1, operator)
    budget = subject.cost().of_schedule(start)
    result = search_segmenter(
        model, scenes, budget, start=start, operator=operator, steps=12, batch_size=8, progress=False, seed=1
    )

    def loss(schedule):
        with torch.no_grad():
            whole, compressed = model.coarse(images), model.compressed(schedule).coarse(images)
        p, q = whole.log_softmax(1), compressed.log_softmax(1)
        return float((p.exp() * (p - q)).sum(1).mean())

    assert result.schedule.merge[2] > 4
    assert loss(result.schedule) < loss(start)


def test_the_papers_recipe_is_refused():
    scenes = SceneImages(noisy_scenes(), flips=False)
    with pytest.raises(diffrate.DiffRateError, match="for classifiers"):
        search(SegmenterSubject(small_segmenter("vit")), scenes, "90%", recipe="paper")


def test_commands(scenes_folder, tmp_path, diffrate_cli):  # noqa: F811
    """Search without labels, evaluate what was found, and refuse what cannot be."""
    seg, run = tmp_path / "seg", tmp_path / "run"
    for i in range(8, 18):  # a search wants more of them; these have no labels
        Image.open(scenes_folder / "train" / f"{i - 8}.png").rotate(180).save(
            scenes_folder / "train" / f"{i}.png"
        )
    assert len(load_scenes(scenes_folder, "train", labelled=False)) == 18
    with shrunk():
        model = noisy(build_segmenter("caformer_s18", len(CLASSES), (64, 96), width=16))
        seg.mkdir()
        save_weights(model, seg / "weights.safetensors")
        settings = {"model": "caformer_s18", "width": 16, "img_size": [64, 96], "classes": list(CLASSES)}
        (seg / "segmenter.json").write_text(json.dumps({"results": settings}))
        asked = ("segment", "search", "--from", seg, "--data-dir", scenes_folder, "--device", "cpu")
        check_refused(diffrate_cli(*asked, "--budget", "2%", "-o", run), "cannot be met")
        assert not run.exists()
        ran = diffrate_cli(*asked, "--budget", "98%,97%", "-o", run, "--steps", 2, "--batch-size", 2)
        assert ran.code == 0, ran.err
        files = sorted(run.glob("schedule-*.json"))
        assert len(files) == 2
        assert diffrate.Schedule.load(files[0]).model == "caformer_s18"
        check_refused(diffrate_cli(*asked, "--budget", "97%", "-o", run), "already holds a search")
        results = tmp_path / "eval.json"
        ran = diffrate_cli(
            *("segment", "eval", "--from", seg, "--data-dir", scenes_folder, "--device", "cpu"),
            *(part for file in files for part in ("--schedule", file)),
            *("--json", results),
        )
        assert ran.code == 0, ran.err
        scores = json.loads(results.read_text())["results"]["scores"]
        assert set(scores) == {"whole", *map(str, files)}
        shares = sorted(scores[str(file)]["gmacs"] / scores["whole"]["gmacs"] for file in files)
        assert shares[0] <= 0.97 < shares[1] <= 0.98
    nowhere = ("segment", "search", "--from", tmp_path, "--data-dir", scenes_folder, "--budget", "70%")
    check_refused(diffrate_cli(*nowhere, "-o", tmp_path / "new"), "holds no model")
    assert not (tmp_path / "new").exists()
