"""The embedded model and images."""

import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.data import resolve_model_data_config

from diffrate import embedded
from diffrate.cli import options, train
from diffrate.cli.train import DROP_PATH
from diffrate.data import build_loader, search_datasets
from diffrate.embedded.build import DEBIAN, HELD_OUT, balanced, read_fashion_mnist, read_idx, training_sets
from diffrate.errors import DiffRateError
from diffrate.methods.by_image import MEASURED_ON
from diffrate.training import EMBEDDED, accuracy

needs_source = pytest.mark.skipif(not DEBIAN.is_dir(), reason="needs Debian's dataset-fashion-mnist")


@pytest.mark.parametrize("split", ["search", "test"])
def test_splits_are_balanced(split: str) -> None:
    images, labels = embedded.images(split)
    count = embedded.SPLITS[split]
    assert images.dtype == torch.uint8
    assert images.shape == (count, 28, 28)
    assert labels.bincount().tolist() == [count // 10] * 10
    assert all(label == position % 10 for position, label in enumerate(labels.tolist()))


def test_no_image_is_there_twice() -> None:
    images = torch.cat([embedded.images(split)[0] for split in embedded.SPLITS])
    assert len({image.numpy().tobytes() for image in images}) == 3_000


def test_the_images_are_a_dataset_of_pictures_too() -> None:
    model = embedded.model()
    learned = next(iter(search_datasets(model, dataset="embedded")[1]))  # plain, and without its label
    images, labels = embedded.images("search")
    torch.testing.assert_close(learned[0], embedded.normalise(images[0, None]))
    assert learned[1] == -1
    tested, its_labels = next(iter(build_loader(model, dataset="embedded", batch_size=7, workers=0)))
    images, labels = embedded.images("test")
    torch.testing.assert_close(tested, embedded.normalise(images[:7, None]))
    assert torch.equal(its_labels, labels[:7])
    colours = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=4, embed_dim=12, num_classes=10
    )
    assert next(iter(build_loader(colours, dataset="embedded", batch_size=2, workers=0)))[0].shape == (
        2,
        3,
        32,
        32,
    )
    for wrong in ({"data_dir": "somewhere"}, {"class_map": "classes.txt"}, {"split": ""}):
        with pytest.raises(DiffRateError, match="embedded"):
            build_loader(model, dataset="embedded", **wrong)


def test_the_images_that_ship_are_those_of_the_model_that_ships_alone() -> None:
    assert options.dataset_for("embedded", "", None) == "embedded"
    assert options.dataset_for("embedded", "", Path("images")) == ""
    assert options.dataset_for("embedded", "torch/x", None) == "torch/x"
    assert options.dataset_for("vit_tiny_patch16_224", "", None) == ""


def test_some_images_are_spread_over_a_set() -> None:
    data = [(torch.tensor(float(i)), 0) for i in range(1001)]
    some = train._some(data)
    assert (len(some), some[0], some[-1]) == (MEASURED_ON, 0, 1000)
    assert len(some.unique()) == MEASURED_ON
    assert len(train._some(data[:3])) == 3


def test_dataset_is_normalised() -> None:
    search = embedded.dataset("search")
    pixels = torch.stack([image for image, _ in search])
    assert pixels.shape == (1_000, 1, 28, 28)
    assert abs(pixels.mean()) < 0.02
    assert abs(pixels.std() - 1) < 0.02
    raw, labels = embedded.images("search")
    image, label = search[7]
    torch.testing.assert_close(image[0], (raw[7] / 255 - embedded.MEAN) / embedded.STD)
    assert label == labels[7]
    doubled, _ = embedded.dataset("search", transform=lambda image: 2 * image)[7]
    assert torch.equal(doubled, 2 * image)


def test_model_has_the_papers_token_count() -> None:
    model = embedded.model(pretrained=False)
    assert model.pos_embed.shape == (1, 197, 96)
    assert len(model.blocks) == 12
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    config = resolve_model_data_config(model)
    assert config["input_size"] == (1, 28, 28)
    assert (config["mean"], config["std"]) == ((embedded.MEAN,), (embedded.STD,))


def test_embedded_weights_are_accurate() -> None:
    test = embedded.dataset("test")
    model = embedded.model().eval()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    # The first 300 of the shipped test images; one standard error of that is 1.5 points.
    recorded = metrics()["results"]["embedded_test_accuracy"]
    assert abs(accuracy(model, embedded.ImageDataset(test.images[:300], test.labels[:300])) - recorded) < 4.5


def test_metrics_say_how_the_weights_were_made() -> None:
    results = metrics()["results"]
    assert results["test_accuracy"] >= 92.5
    best = results["history"][results["best_epoch"] - 1]
    assert (
        best["accuracy"] == results["validation_accuracy"] == max(e["accuracy"] for e in results["history"])
    )
    # the defaults of the command are the recipe; compiling changes its speed alone
    made = dict(results["recipe"], compile=False)
    assert made.pop("drop_path") == DROP_PATH
    assert made == {name: value for name, value in asdict(EMBEDDED).items() if name in made}
    assert results["parameters"] == sum(p.numel() for p in embedded.model(pretrained=False).parameters())


def metrics() -> dict[str, Any]:
    return json.loads((embedded.FOLDER / "metrics.json").read_text())


def test_missing_weights_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(embedded, "WEIGHTS", tmp_path / "weights.safetensors")
    with pytest.raises(DiffRateError, match="diffrate train"):
        embedded.model()


def test_unknown_split_is_named() -> None:
    with pytest.raises(DiffRateError, match=r"'val'.*search, test"):
        embedded.images("val")


def test_dataset_refuses_floats_and_wrong_labels() -> None:
    with pytest.raises(DiffRateError, match="uint8"):
        embedded.ImageDataset(torch.zeros(3, 28, 28), torch.zeros(3))
    with pytest.raises(DiffRateError, match="3 images"):
        embedded.ImageDataset(torch.zeros(3, 28, 28, dtype=torch.uint8), torch.zeros(2))


def test_a_smaller_choice_begins_a_larger_one() -> None:
    labels = torch.arange(1000) % 10
    small, large = balanced(labels, 50), balanced(labels, 200)
    assert torch.equal(large[:50], small)
    assert labels[large].bincount().tolist() == [20] * 10
    assert large.unique().numel() == 200
    with pytest.raises(DiffRateError, match="equally"):
        balanced(labels, 55)
    with pytest.raises(DiffRateError, match="equally"):
        balanced(labels, 2000)


def test_read_idx(tmp_path) -> None:
    values = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    data = b"\0\0\x08\x03" + np.array(values.shape, ">i4").tobytes() + values.tobytes()
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(data))
    assert read_idx(path).tolist() == values.tolist()
    for broken in (gzip.compress(data[:-1]), gzip.compress(b"\0\0"), gzip.compress(data)[:-9], b"no gzip"):
        path.write_bytes(broken)
        with pytest.raises(DiffRateError, match=r"images\.gz"):
            read_idx(path)
    with pytest.raises(DiffRateError, match="missing"):
        read_idx(tmp_path / "none.gz")


@needs_source
@pytest.mark.slow
def test_files_come_from_the_source_and_search_images_are_never_trained_on() -> None:
    training, held_out, test = training_sets(DEBIAN)
    images, labels = embedded.images("search")
    assert torch.equal(held_out.images[:1_000], images)
    assert torch.equal(held_out.labels[:1_000], labels)
    assert (len(training), len(held_out), len(test)) == (60_000 - HELD_OUT, HELD_OUT, 10_000)
    apart = {image.numpy().tobytes() for image in held_out.images}
    assert not apart & {image.numpy().tobytes() for image in training.images}
    chosen = balanced(read_fashion_mnist(DEBIAN, "test")[1], 2_000)
    assert torch.equal(test.images[chosen], embedded.images("test")[0])
