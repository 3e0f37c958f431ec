"""`diffrate finetune` and `diffrate train` on a folder of images, and what they refuse."""

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import diffrate
from conftest import TINY, TINY_FLAGS, Ran, check_refused, random_vit, write_image
from diffrate import DiffRateError, Schedule
from diffrate.data import training_datasets
from diffrate.models import load_model
from diffrate.seeding import seeded

QUICK = ["--epochs", 2, "--batch-size", 4, "--precision", "no", "--device", "cpu", "--workers", 0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(14):
        write_image(tmp_path / ("train" if i < 9 else "val") / f"{i % 3:03d}" / f"{i:02d}.png", seed=i)
    save_file(random_vit(**TINY).state_dict(), tmp_path / "weights.safetensors")
    Schedule([17, 14, 10, 6], [17, 12, 8, 4]).save(tmp_path / "schedule.json")
    return tmp_path


def flags(folder: Path, command: str, *more: object) -> list[object]:
    data = ["--data-dir", folder, "--output", folder / "run", "--schedule", folder / "schedule.json"]
    return [command, *TINY_FLAGS, *data, *QUICK, *more]


def test_finetune_and_train_write_weights_that_fit_the_model(
    folder: Path, diffrate_cli: Callable[..., Ran]
) -> None:
    tuned = diffrate_cli(
        *flags(folder, "finetune", "--checkpoint", folder / "weights.safetensors", "--lr", 1e-3)
    )
    assert tuned.code == 0, tuned.err
    before, after = (
        load_file(folder / "weights.safetensors"),
        load_file(folder / "run" / "weights.safetensors"),
    )
    assert before.keys() == after.keys()
    moved = max((after[name] - before[name]).abs().max() for name in before)
    assert 1e-4 < moved < 0.1  # tuned from there, and not made anew
    metrics = json.loads((folder / "run" / "metrics.json").read_text())
    assert metrics["results"]["schedule"]["merge"] == [17, 12, 8, 4]
    assert metrics["results"]["training_images"] == 9
    assert len(metrics["results"]["history"]) == 2
    assert "--lr 0.001" in metrics["command"]
    assert "images/s" in tuned.err
    assert metrics["results"]["recipe"]["drop_path"] == 0.1  # by default, as the paper's recipe
    scratch = diffrate_cli(*flags(folder, "train", "--output", folder / "scratch", "--repeats", 1))
    assert scratch.code == 0, scratch.err
    made = load_file(folder / "scratch" / "weights.safetensors")
    assert max((made[name] - before[name]).abs().max() for name in before) > 0.3


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--batch-size", 5], "does not fall into 1 equal parts, each of them even"),
        (["--batch-size", 12], "9 images do not fill one batch of 12"),
        (["--precision", "int4"], "precision must be no, fp16 or bf16"),
        (["--opt", "magic"], "timm cannot make the optimiser magic"),
        (["--schedule", "nowhere.json"], "cannot read the schedule nowhere.json"),
        (["--schedule", "published:0.8"], "no published schedule fits"),
        (["--val-split", "test"], "has no split 'test'"),
        (["--resume"], "holds no training to resume"),
        (["--drop-path", 1], "--drop-path is a share below 1, not 1"),
        (
            ["--model", "transformers:nowhere", "--drop-path", 0.3],
            "--drop-path is for timm's models: transformers:nowhere has no such setting",
        ),
        pytest.param(
            ["--tracker", "tensorboard"],
            "the tracker tensorboard is not installed",
            marks=[
                pytest.mark.skipif(find_spec("tensorboard") is not None, reason="tensorboard is installed"),
                pytest.mark.filterwarnings("ignore:.*no supported trackers"),
            ],
        ),
        (["--checkpoint", "nowhere.safetensors"], "checkpoint nowhere.safetensors does not exist"),
    ],
)
def test_mistakes_end_in_a_sentence_and_write_nothing(
    folder: Path, diffrate_cli: Callable[..., Ran], more: list[object], sentence: str
) -> None:
    check_refused(diffrate_cli(*flags(folder, "finetune", *more)), sentence)
    assert not (folder / "run").exists()


def test_an_unreadable_image_ends_the_training_by_name(
    folder: Path, diffrate_cli: Callable[..., Ran]
) -> None:
    (folder / "train" / "000" / "00.png").write_bytes(b"no image")
    ran = diffrate_cli(*flags(folder, "finetune", "--batch-size", 8))
    assert ran.code == 2
    assert "cannot read the image" in ran.err
    assert "00.png" in ran.err


def test_training_images_are_augmented_and_validation_images_are_not(folder: Path) -> None:
    model = load_model("vit_tiny_patch16_224", num_classes=3, img_size=32, model_kwargs={"patch_size": 8})
    training, validation = training_datasets(model, folder)
    assert (len(training), len(validation)) == (9, 5)
    assert torch.equal(validation[0][0], validation[0][0])
    assert not torch.equal(training[0][0], training[0][0])
    views = []
    for _ in range(2):
        with seeded(7):
            views.append(training[0][0])
    assert torch.equal(*views)
    with pytest.raises(DiffRateError, match="has no split 'nowhere'"):
        training_datasets(model, folder, split="nowhere")


def test_from_scratch_there_is_no_teacher(folder: Path, diffrate_cli: Callable[..., Ran]) -> None:
    check_refused(
        diffrate_cli(*flags(folder, "train", "--distillation", 0.5)), "distillation needs a teacher"
    )
    assert not (folder / "run").exists()


@pytest.mark.parametrize("method", ["dynamicvit", "spvit", "evo-vit", "tome", "ats"])
def test_methods_are_tuned_evaluated_and_compared(
    folder: Path, diffrate_cli: Callable[..., Ran], method: str
) -> None:
    start = ["--checkpoint", folder / "weights.safetensors"]
    data = ["--data-dir", folder, "--split", "val", "--device", "cpu", "--workers", 0]
    run = [*TINY_FLAGS, *start, "--data-dir", folder, "--output", folder / "run", *QUICK]
    tuned = diffrate_cli("finetune", *run, "--method", method, "--budget", "70%", "--lr", 1e-3)
    assert tuned.code == 0, tuned.err
    config = json.loads((folder / "run" / "config.json").read_text())
    assert config["method"]["method"] == method
    metrics = json.loads((folder / "run" / "metrics.json").read_text())["results"]
    assert metrics["gmacs"] == pytest.approx(0.7 * whole_gmacs(), rel=0.05)
    seen = diffrate_cli(
        "eval", *TINY_FLAGS, *start, *data, "--trained", folder / "run", "--json", folder / "e.json"
    )
    assert seen.code == 0, seen.err
    top1 = json.loads((folder / "e.json").read_text())["results"]["compressed"]["top1"]
    assert top1 == pytest.approx(metrics["validation_accuracy"])  # the weights that training chose, read back
    compared = diffrate_cli(
        "compare", *TINY_FLAGS, *start, *data, "--trained", folder / "run", "--methods", "evit"
    )
    assert compared.code == 0, compared.err
    assert re.search(rf"{method}, tuned\b.*{top1:.2f}", compared.out)
    assert "evit" in compared.out
    again = diffrate_cli("finetune", *run, "--method", method, "--budget", "60%", "--resume")
    check_refused(again, "was started with another")
    damaged = folder / "run" / "config.json"
    damaged.write_text(json.dumps({**config, "method": {"method": method}}))
    refused = diffrate_cli("eval", *TINY_FLAGS, *start, *data, "--trained", folder / "run")
    check_refused(refused, "does not describe")


def whole_gmacs() -> float:
    return diffrate.gmacs(random_vit(**TINY))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ([], "needs a --schedule, or a --method"),
        (["--method", "tome"], "go together"),
        (["--method", "tome", "--budget", "70%,60%"], "one budget"),
        (["--method", "random", "--budget", "70%"], "nothing of its own to train"),
        (["--method", "nope", "--budget", "70%"], "there is no method 'nope'"),
        (["--method", "dynamicvit", "--budget", "1%"], "cannot meet a budget"),
        (["--method", "dynamicvit", "--budget", "70%", "--distillation", 0.5], "leave distillation at 0"),
    ],
)
def test_what_tuning_a_method_refuses(
    folder: Path, diffrate_cli: Callable[..., Ran], more: list[object], sentence: str
) -> None:
    run = [*TINY_FLAGS, "--checkpoint", folder / "weights.safetensors", "--data-dir", folder]
    check_refused(diffrate_cli("finetune", *run, "--output", folder / "run", *QUICK, *more), sentence)
    assert not (folder / "run").exists()


def test_a_trained_folder_must_be_one(folder: Path, diffrate_cli: Callable[..., Ran]) -> None:
    run = ["eval", *TINY_FLAGS, "--data-dir", folder, "--split", "val", "--device", "cpu", "--workers", 0]
    check_refused(diffrate_cli(*run, "--trained", folder), "holds no training")
    with_both = diffrate_cli(*run, "--trained", folder, "--schedule", folder / "schedule.json")
    check_refused(with_both, "leave --schedule out")
