"""The training loop, its augmentation and its command, on a small model and a few images."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn
from typer import Typer
from typer.testing import CliRunner

from conftest import Ran, check_refused
from diffrate import embedded
from diffrate.cli.train import train_command
from diffrate.errors import DiffRateError
from diffrate.resident import ResidentImages, crop_and_flip, erase
from diffrate.training import EMBEDDED, Recipe, accuracy, train
from diffrate.training.batches import ResidentBatches
from diffrate.training.checkpoint import save_weights

QUICK = {"epochs": 6, "batch_size": 40, "lr": 3e-3, "warmup_epochs": 1, "ema_decay": 0.9, "precision": "no"}
PLAIN = {"erasing": 0.0, "crop_padding": 0}


def recipe(**changes: object) -> Recipe:
    return replace(EMBEDDED, **QUICK | changes)


def small(seed: int = 0, **kwargs) -> nn.Module:
    torch.manual_seed(seed)
    shape = {"img_size": 28, "patch_size": 7, "in_chans": 1, "embed_dim": 32, "num_heads": 1, "depth": 2}
    return timm.create_model("vit_tiny_patch16_224", num_classes=10, **shape, **kwargs)


def some(split: str, count: int) -> embedded.ImageDataset:
    images, labels = embedded.images(split)
    return embedded.ImageDataset(images[:count], labels[:count])


def test_loss_falls_and_the_model_learns(tmp_path: Path) -> None:
    model, validation = small(), some("test", 200)
    before = accuracy(model, validation)
    trained = train(
        model, some("search", 400), validation, tmp_path, recipe(**PLAIN), dtype=torch.float16, progress=False
    )
    losses = [epoch["loss"] for epoch in trained.history]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.3
    assert trained.accuracy > before + 20
    assert trained.accuracy == max(epoch["accuracy"] for epoch in trained.history)
    assert trained.history[trained.epoch - 1]["accuracy"] == trained.accuracy
    # the model is left at the weights in the file, which fp16 hardly changes
    stored = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(value, stored[name].float()) for name, value in model.state_dict().items())
    assert {value.dtype for value in stored.values()} == {torch.float16}
    assert abs(accuracy(model, validation) - trained.accuracy) <= 0.5
    assert not model.training
    assert "forward" not in vars(model)  # nothing of the mixed precision is left on it


def test_a_seed_reproduces_the_run(tmp_path: Path) -> None:
    def run(name: str, seed: int) -> dict[str, torch.Tensor]:
        train(
            small(drop_path_rate=0.1),
            some("search", 120),
            some("test", 50),
            tmp_path / name,
            recipe(epochs=2, mixup=0.2, seed=seed),
            progress=False,
        )
        return load_file(tmp_path / name / "weights.safetensors")

    first, again, other = run("first", 1), run("again", 1), run("other", 2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_any_torch_dataset_trains(tmp_path: Path) -> None:
    images, labels = embedded.images("search")
    dataset = embedded.ImageDataset(images[:80], labels[:80], transform=lambda image: image.flip(-1))
    trained = train(small(), dataset, dataset, tmp_path, recipe(epochs=1, **PLAIN), progress=False)
    assert np.isfinite(trained.history[0]["loss"])


def test_time_limit_stops_cleanly(tmp_path: Path) -> None:
    trained = train(
        small(),
        some("search", 80),
        some("test", 50),
        tmp_path,
        recipe(epochs=50),
        max_minutes=0,
        progress=False,
    )
    assert trained.epoch == len(trained.history) == 1
    assert (tmp_path / "weights.safetensors").is_file()


def test_loss_that_is_not_finite_stops_and_says_so(tmp_path: Path) -> None:
    model = small()
    nn.init.constant_(model.head.weight, float("nan"))
    with pytest.raises(DiffRateError, match="nan in epoch 1"):
        train(model, some("search", 80), some("test", 50), tmp_path, recipe(), progress=False)


def test_weights_come_back_bit_for_bit(tmp_path: Path) -> None:
    path, model = tmp_path / "new" / "weights.safetensors", small(1)
    save_weights(model, path)
    other = small(2)
    other.load_state_dict(load_file(path))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    assert [file.name for file in path.parent.iterdir()] == ["weights.safetensors"]


def test_a_failed_write_keeps_the_old_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.safetensors"
    save_weights(small(1), path)
    before = path.read_bytes()

    def full_disk(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(DiffRateError, match="disk full"):
        save_weights(small(2), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["weights.safetensors"]


def test_crop_and_flip_shifts_and_mirrors_whole_images() -> None:
    images = torch.arange(1, 64 * 2 * 5 * 6 + 1).view(64, 2, 5, 6)
    out = crop_and_flip(images, 1, torch.Generator().manual_seed(0))
    seen = set()
    for image, result in zip(images, out, strict=True):
        padded = nn.functional.pad(image, (1,) * 4)
        windows = {(y, x): padded[:, y : y + 5, x : x + 6] for y in range(3) for x in range(3)}
        # mirrored first or last is the same set of outcomes: the shift is symmetric
        fits = [
            (at, m)
            for at, w in windows.items()
            for m in (0, 1)
            if torch.equal(w.flip(-1) if m else w, result)
        ]
        assert len(fits) == 1
        seen.update(fits)
    assert len(seen) > 12  # of 18


def test_erasing_takes_rectangles_of_the_right_share_and_size() -> None:
    images = torch.full((4000, 1, 28, 28), 9.0)
    out = erase(images, 0.25, torch.Generator().manual_seed(0))
    erased = (out != 9).squeeze(1)
    hit = erased.flatten(1).any(1)
    assert abs(hit.float().mean() - 0.25) < 0.03
    share = erased[hit].float().mean((1, 2))
    assert share.min() > 0.005
    assert share.max() < 0.42
    assert abs(share.mean() - (0.02 + 1 / 3) / 2) < 0.02
    rows, columns = erased[hit].any(2).sum(1), erased[hit].any(1).sum(1)
    assert torch.equal(rows * columns, erased[hit].sum((1, 2)))  # full rectangles
    assert torch.equal(erase(images, 0.0, torch.Generator()), images)


def test_resident_loader_gives_every_image_once_with_its_label() -> None:
    images = torch.arange(100, dtype=torch.uint8)[:, None, None].expand(100, 4, 4).contiguous()
    plain = Recipe(batch_size=30, rand_augment=0, erasing=0, repeats=1)
    batches = ResidentBatches(embedded.ImageDataset(images, torch.arange(100)), plain, torch.device("cpu"))
    epochs = [list(batches.parts(0, 3, 0, 1)), list(batches.parts(3, 6, 0, 1))]
    for epoch in epochs:
        labels = torch.cat([labels for _, labels in epoch])
        assert labels.unique().numel() == 90
        pixels = torch.cat([images for images, _ in epoch])
        torch.testing.assert_close(pixels[:, 0, 2, 2], embedded.normalise(labels))
    assert not torch.equal(epochs[0][0][1], epochs[1][0][1])


def test_every_image_of_a_batch_draws_its_own_augmentation() -> None:
    image = some("search", 1).images
    copies = embedded.ImageDataset(image.expand(64, -1, -1).contiguous(), torch.zeros(64, dtype=torch.long))
    strong = ResidentImages(copies, "cpu", rand_augment=9)
    batch, _ = strong.augmented(torch.arange(64), seed=3)
    assert len({tuple(each.flatten().tolist()) for each in batch}) > 30
    assert torch.equal(batch, strong.augmented(torch.arange(64), seed=3)[0])
    assert not torch.equal(batch, strong.augmented(torch.arange(64), seed=4)[0])
    plain = embedded.normalise(image[:, None].float())
    assert (batch - plain).abs().mean() > 0.1  # at a magnitude of 9 of 10


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, "epochs must be above 0"),
        ({"lr": -1.0}, "lr must be above 0"),
        ({"smoothing": 1.5}, "smoothing must be between 0 and 1"),
        ({"precision": "int8"}, "precision must be"),
    ],
)
def test_impossible_recipes_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(DiffRateError, match=message):
        Recipe(**wrong)


def test_too_few_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DiffRateError, match="10 images do not fill one batch of 40"):
        train(small(), some("search", 10), some("test", 10), tmp_path, recipe())


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))


def test_command_writes_weights_and_how_they_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stem, split, count in (("train", "search", 200), ("t10k", "test", 100)):
        dataset = some(split, count)
        write_idx(tmp_path / f"{stem}-images-idx3-ubyte.gz", dataset.images.numpy())
        write_idx(tmp_path / f"{stem}-labels-idx1-ubyte.gz", dataset.labels.numpy())
    monkeypatch.setattr(embedded, "model", lambda pretrained, **kwargs: small(**kwargs))
    app = Typer()
    app.command()(train_command)
    output = tmp_path / "output"
    options = (
        f"--data-dir {tmp_path} --output {output} --epochs 2 --batch-size 20 --held-out 50 --precision no"
    )
    result = CliRunner().invoke(app, options.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["command"] == (
        "diffrate train --output DIR --data-dir DIR --held-out 50 --epochs 2 --batch-size 20 --precision no"
    )
    results = metrics["results"]
    assert results["training_images"] == 150
    assert results["recipe"]["batch_size"] == 20
    model = small()
    model.load_state_dict(load_file(output / "weights.safetensors"))
    assert accuracy(model, some("test", 100)) == results["test_accuracy"]
    assert accuracy(model, embedded.dataset("test")) == results["embedded_test_accuracy"]


def test_command_is_part_of_the_program(diffrate_cli: Callable[..., Ran], tmp_path: Path) -> None:
    helped = diffrate_cli("train", "--help")
    assert helped.code == 0
    assert "Example: diffrate train" in helped.out
    refused = diffrate_cli("train", "--output", tmp_path / "output", "--data-dir", tmp_path / "nowhere")
    check_refused(refused, "nowhere/train-images-idx3-ubyte.gz is missing")
    assert not (tmp_path / "output").exists()
