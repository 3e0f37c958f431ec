"""The command line: what it prints and what it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import diffrate
from conftest import TINY_FLAGS, Ran, check_refused
from diffrate import published
from diffrate.data import build_loader

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "imagenet"
Cli = Callable[..., Ran]

PRUNE, MERGE = (17, 14, 10, 3), (17, 12, 8, 3)


@pytest.fixture
def schedule_file(tmp_path: Path) -> Path:
    diffrate.Schedule(PRUNE, MERGE).save(tmp_path / "schedule.json")
    return tmp_path / "schedule.json"


# --- schedules, macs, compress ------------------------------------------------------------------------------------


def test_schedules_lists_what_is_published(diffrate_cli: Cli, tmp_path: Path) -> None:
    ran = diffrate_cli("schedules", "--json", tmp_path / "out.json")
    assert ran.code == 0
    listed = json.loads((tmp_path / "out.json").read_text())["results"]["schedules"]
    assert listed == published.table()
    assert len(ran.out.splitlines()) == 1 + len(listed)
    one = diffrate_cli("schedules", "--model", "deit_tiny_patch16_224")
    assert len(one.out.splitlines()) == 1 + 5
    assert "197,197,196,186,166,147,117,103,92,80,74,3" in one.out  # the paper's 0.8 G


def test_schedules_of_a_model_of_the_same_shape(diffrate_cli: Cli) -> None:
    own, borrowed = (
        diffrate_cli("schedules", "--model", f"{kind}_tiny_patch16_224") for kind in ("deit", "vit")
    )
    assert borrowed.out == own.out
    assert "borrow" in borrowed.err
    assert not own.err


def test_schedules_of_an_unknown_model(diffrate_cli: Cli) -> None:
    check_refused(diffrate_cli("schedules", "--model", "resnet50"), "no schedule is published for 'resnet50'")


def test_macs_before_and_after(
    diffrate_cli: Cli, schedule_file: Path, tiny_vit: nn.Module, tmp_path: Path
) -> None:
    ran = diffrate_cli("macs", *TINY_FLAGS, "--schedule", schedule_file, "--json", tmp_path / "out.json")
    assert ran.code == 0, ran.err
    written = json.loads((tmp_path / "out.json").read_text())["results"]["gmacs"]
    # Counted by hand: embedding, attention over what a block receives, MLP over what it keeps, classifier.
    width, received = 32, (17, *MERGE[:-1])
    blocks = sum(
        4 * n * width**2 + 2 * n**2 * width + 8 * k * width**2 for n, k in zip(received, MERGE, strict=True)
    )
    expected = (16 * 3 * 64 * width + blocks + 3 * width) / 1e9
    assert written["compressed"] == pytest.approx(expected, rel=1e-6)
    assert written["uncompressed"] > written["compressed"]
    assert "uncompressed" in ran.out


def test_compress_writes_what_it_knows(diffrate_cli: Cli, tiny_vit: nn.Module, tmp_path: Path) -> None:
    output = tmp_path / "new" / "schedule.json"
    lists = ["--prune", ",".join(map(str, PRUNE)), "--merge", ",".join(map(str, MERGE))]
    ran = diffrate_cli(
        "compress", *TINY_FLAGS, *lists, "--merge-mean", "size", "--no-proportional", "-o", output
    )
    assert ran.code == 0, ran.err
    schedule = diffrate.Schedule.load(output)
    assert (schedule.prune, schedule.merge, schedule.prefix) == (PRUNE, MERGE, 1)
    assert (schedule.model, schedule.img_size) == ("vit_tiny_patch16_224", (32, 32))
    assert schedule.cost["gmacs"] == pytest.approx(diffrate.gmacs(tiny_vit, schedule))
    assert (schedule.operator.mean, schedule.operator.proportional) == ("size", False)
    assert schedule.made
    # A written schedule is one that can be read again, and keeps the operator it was written with.
    again = diffrate_cli("compress", *TINY_FLAGS, "--schedule", output, "-o", tmp_path / "again.json")
    assert again.code == 0, again.err
    assert diffrate.Schedule.load(tmp_path / "again.json") == schedule


def test_one_flag_has_the_papers_operator_or_the_fast_recipes(diffrate_cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "schedule.json"

    def written(*flags: object) -> diffrate.Operator:
        ran = diffrate_cli("compress", *TINY_FLAGS, *flags, "-o", output)
        assert ran.code == 0, ran.err
        return diffrate.Schedule.load(output).operator

    plain = written("--merge", "17,12,8,3")
    fast = written("--schedule", output, "--operator", "fast")
    assert fast == plain.changed(operation="merge", mean="attention", choice="cost", keep_norm=True)
    assert written("--schedule", output, "--operator", "paper") == plain
    partly = written("--schedule", output, "--operator", "fast", "--merge-mean", "size", "--no-keep-norm")
    assert partly == fast.changed(mean="size", keep_norm=False)
    wrong = diffrate_cli("compress", *TINY_FLAGS, "--schedule", output, "--operator", "tome", "-o", output)
    check_refused(wrong, "operator must be one of paper, fast, not 'tome'")


def test_compress_from_one_list(diffrate_cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "schedule.json"
    assert diffrate_cli("compress", *TINY_FLAGS, "--merge", "17,12,8,3", "-o", output).code == 0
    merged = diffrate.Schedule.load(output)
    assert (merged.prune, merged.merge) == ((17, 17, 12, 8), (17, 12, 8, 3))  # nothing is pruned
    assert diffrate_cli("compress", *TINY_FLAGS, "--prune", "17,12,8,3", "-o", output).code == 0
    pruned = diffrate.Schedule.load(output)
    assert pruned.prune == pruned.merge == (17, 12, 8, 3)


def test_published_schedule_of_a_model_of_the_same_shape_is_said_to_be_borrowed(
    diffrate_cli: Cli, tmp_path: Path
) -> None:
    flags = ["compress", "--schedule", "published:0.8", "-o", tmp_path / "schedule.json"]
    borrowed = diffrate_cli(*flags, "--model", "vit_tiny_patch16_224")
    assert borrowed.code == 0
    assert re.search("Note: .*borrowed for vit_tiny_patch16_224", borrowed.err)
    own = diffrate_cli(*flags, "--model", "deit_tiny_patch16_224")
    assert own.code == 0
    assert "borrowed" not in own.err
    assert diffrate.Schedule.load(tmp_path / "schedule.json").cost["gmacs"] == pytest.approx(0.809, abs=5e-4)


def test_rising_counts_are_no_error_and_the_effective_schedule_is_shown(
    diffrate_cli: Cli, tmp_path: Path
) -> None:
    lists = ["--prune", "17,10,16,16", "--merge", "17,10,12,9"]
    ran = diffrate_cli("compress", *TINY_FLAGS, *lists, "-o", tmp_path / "schedule.json")
    assert ran.code == 0, ran.err
    assert "effective schedule" in ran.err
    assert "prune 17,10,10,10\n" in ran.err
    assert "merge 17,10,10,9\n" in ran.err


# --- eval ---------------------------------------------------------------------------------------------------------


def test_eval_against_the_library(
    diffrate_cli: Cli, eval_flags: list[object], schedule_file: Path, tiny_vit: nn.Module, image_folder: Path
) -> None:
    out = schedule_file.with_name("out.json")
    ran = diffrate_cli(*eval_flags, "--schedule", schedule_file, "--compare", "--json", out)
    assert ran.code == 0, ran.err
    record = json.loads(out.read_text())
    results = record["results"]
    images, labels = next(iter(build_loader(tiny_vit, image_folder, batch_size=12, workers=0)))
    for name, model in (
        ("uncompressed", tiny_vit),
        ("compressed", diffrate.compress(tiny_vit, diffrate.Schedule(PRUNE, MERGE))),
    ):
        with torch.no_grad():
            logits = model(images)
        assert results[name]["top1"] == pytest.approx(
            100 * (logits.argmax(1) == labels).float().mean().item()
        )
        assert results[name]["loss"] == pytest.approx(
            nn.functional.cross_entropy(logits, labels).item(), abs=1e-5
        )
        assert results[name]["images"] == 12
    compressed, whole = results["compressed"], results["uncompressed"]
    assert results["comparison"]["loss_difference"] == pytest.approx(
        compressed["loss"] - whole["loss"], abs=1e-6
    )
    assert compressed["loss"] != whole["loss"]
    assert compressed["gmacs"] == pytest.approx(diffrate.gmacs(tiny_vit, diffrate.Schedule(PRUNE, MERGE)))
    assert results["schedule"]["merge"] == list(MERGE)
    assert record["command"].startswith("diffrate eval --model vit_tiny_patch16_224")
    assert f"{whole['top1']:.2f}" in ran.out
    assert "of 12 predictions changed" in ran.out


def test_eval_without_schedule_is_the_model_itself(
    diffrate_cli: Cli, eval_flags: list[object], tmp_path: Path
) -> None:
    ran = diffrate_cli(*eval_flags, "--json", tmp_path / "out.json")
    assert ran.code == 0, ran.err
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert "compressed" not in results
    assert results["uncompressed"]["images"] == 12
    assert results["schedule"] is None
    check_refused(diffrate_cli(*eval_flags, "--compare"), "--compare .*needs a --schedule")


def test_operator_options_reach_the_model(
    diffrate_cli: Cli, eval_flags: list[object], schedule_file: Path
) -> None:
    losses = set()
    out = schedule_file.with_name("out.json")
    for options in ([], ["--importance", "random", "--seed", "1"], ["--importance", "random", "--seed", "2"],
                    ["--operation", "prune"], ["--no-proportional"], ["--merge-mean", "size"]):  # fmt: skip
        assert diffrate_cli(*eval_flags, "--schedule", schedule_file, *options, "--json", out).code == 0
        losses.add(json.loads(out.read_text())["results"]["compressed"]["loss"])
    assert len(losses) == 6
    wrong = diffrate_cli(*eval_flags, "--schedule", schedule_file, "--importance", "luck")
    check_refused(wrong, "importance must be one of .*, not 'luck'")


# --- help, and the program itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["schedules", "macs", "compress", "eval"])
def test_help_shows_an_example(diffrate_cli: Cli, command: str) -> None:
    ran = diffrate_cli(command, "--help")
    assert ran.code == 0
    assert f"Example: diffrate {command}" in ran.out
    assert "--json" in ran.out


def test_version(diffrate_cli: Cli) -> None:
    assert diffrate_cli("--version").out == f"diffrate {diffrate.__version__}\n"


def test_the_readmes_python_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    names: dict[str, object] = {}
    exec(code.replace("pretrained=True", "pretrained=False"), names)  # tests do not download weights
    assert names["model"] is names["fast"].original  # type: ignore[attr-defined]
    assert names["logits"].shape == (8, 1000)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="the ImageNet subset is not beside the repository")
def test_a_real_model_on_real_images(diffrate_cli: Cli, tmp_path: Path) -> None:
    """ViT-T on every tenth class of 2,000 ImageNet images, with the schedule borrowed from DeiT-T."""
    for index in range(0, 1000, 10):
        (tmp_path / "val" / f"{index:03d}").parent.mkdir(exist_ok=True)
        (tmp_path / "val" / f"{index:03d}").symlink_to(SHARED / "val" / f"{index:03d}")
    ran = diffrate_cli(
        "eval", "--model", "vit_tiny_patch16_224", "--checkpoint", SHARED / "vit_tiny_patch16_224.safetensors",
        "--data-dir", tmp_path, "--split", "val", "--crop-pct", "1.0", "--compare", "--schedule", "published:0.8",
        "--json", tmp_path / "out.json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert results["compressed"]["images"] == 200
    assert results["compressed"]["gmacs"] == pytest.approx(0.809, abs=5e-4)
    # On all 2,000 images: 75.25 uncompressed, and -0.30 points and +0.029 loss under the schedule.
    assert 68 < results["uncompressed"]["top1"] < 83
    assert results["comparison"]["top1_difference"] > -4
    assert abs(results["comparison"]["loss_difference"]) < 0.1
    assert 0 < results["comparison"]["changed"] < 30
