"""Mistakes on the command line: one sentence each, exit code 2, no traceback, nothing written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import TINY_FLAGS, Ran, check_refused, write_image

Cli = Callable[..., Ran]


def file_with(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


BAD_SCHEDULES = {
    "another depth": (
        '{"format": "diffrate.schedule", "version": 1, "prune": [17, 9], "merge": [17, 9]}',
        "2 blocks",
    ),
    "above the model's tokens": (
        '{"format": "diffrate.schedule", "version": 1, "prune": [18, 18, 18, 18], "merge": [18, 18, 18, 18]}',
        "18 tokens and the model has 17",
    ),
    "above its own tokens": (
        '{"format": "diffrate.schedule", "version": 1, "prune": [17, 99, 9, 9], "merge": [17, 9, 9, 9]}',
        r"prune\[1\] is 99",
    ),
    "zero": (
        '{"format": "diffrate.schedule", "version": 1, "prune": [17, 9, 9, 0], "merge": [17, 9, 9, 0]}',
        r"prune\[3\] is 0",
    ),
    "text for a count": (
        '{"format": "diffrate.schedule", "version": 1, "prune": [17, "9", 9, 9], "merge": [17, 9, 9, 9]}',
        r"prune\[1\] must be a whole number",
    ),
    "corrupt": ('{"format": "diffrate.schedule", "prune": [17,', "not a JSON schedule"),
    "not a schedule": ('{"hello": "world"}', "no schedule"),
    "nested without end": ("[" * 100_000, "not a JSON schedule"),
    "a huge number": (
        '{"format": "diffrate.schedule", "version": 1, "prune": [1e999], "merge": [17]}',
        r"prune\[0\] must be a whole number",
    ),
    "empty": ("", "not a JSON schedule"),
}


@pytest.mark.parametrize("command", ["eval", "macs", "compress"])
@pytest.mark.parametrize("case", BAD_SCHEDULES)
def test_bad_schedules(
    diffrate_cli: Cli, eval_flags: list[object], tmp_path: Path, command: str, case: str
) -> None:
    text, sentence = BAD_SCHEDULES[case]
    schedule = file_with(tmp_path / "bad.json", text)
    before = sorted(tmp_path.rglob("*"))
    flags = eval_flags if command == "eval" else [command, *TINY_FLAGS]
    flags = [*flags, "--schedule", schedule, "--json", tmp_path / "out.json"]
    if command == "compress":
        flags += ["--output", tmp_path / "new.json"]
    check_refused(diffrate_cli(*flags), sentence)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["macs", "--model", "swin_tiny_patch4_window7_224"], ".*[Ss]win"),
        (["macs", "--model", "resnet18"], ".*[Rr]es[Nn]et"),
        (["macs", "--model", "no_such_model"], "timm knows no model 'no_such_model'"),
        (["macs", *TINY_FLAGS, "--schedule", "absent.json"], "absent.json"),
        (["macs", *TINY_FLAGS, "--schedule", "published:0.8"], "no published schedule fits"),
        (["macs", *TINY_FLAGS, "--schedule", "published:little"], "published:0.8, not 'published:little'"),
        (
            ["macs", "--model", "deit_tiny_patch16_224", "--schedule", "published:0.85"],
            "0.85 GMACs.*0.6, 0.7, 0.8",
        ),
        (["macs", *TINY_FLAGS, "--img-size", "big"], "image size"),
        (["macs", *TINY_FLAGS, "--model-kwargs", "depth"], "key=value"),
        (["compress", *TINY_FLAGS, "-o", "new.json"], "either --schedule, or --prune and --merge"),
        (["compress", *TINY_FLAGS, "-o", "new.json", "--prune", "17,a,3"], "--prune takes one count a block"),
        (
            ["compress", *TINY_FLAGS, "-o", "new.json", "--prune", "17,9", "--merge", "17"],
            "2 blocks and merge has 1",
        ),
        (["compress", *TINY_FLAGS, "-o", ".", "--merge", "17,9,9,9"], "cannot write"),
        (["compress", "--model", "no_such_model", "-o", "."], "cannot write"),  # before the model is built
    ],
)
def test_mistakes_without_data(
    diffrate_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    check_refused(diffrate_cli(*flags, "--json", "out.json"), sentence)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["--checkpoint", "absent.safetensors"], "absent.safetensors does not exist"),
        (["--split", "train"], "no split 'train'"),
        (["--data-dir", "absent"], "absent does not exist"),
        (["--device", "cuda:99"], "device cuda:99 cannot be used"),
        (["--amp", "--amp-dtype", "int8"], "amp dtype"),
        (["--num-classes", "2"], "does not load into"),
        (["--json", "."], "cannot write"),
    ],
)
def test_mistakes_in_eval(
    diffrate_cli: Cli, eval_flags: list[object], tmp_path: Path, changes: list[str], sentence: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    check_refused(diffrate_cli(*eval_flags, "--json", tmp_path / "out.json", *changes), sentence)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_image(
    diffrate_cli: Cli, eval_flags: list[object], image_folder: Path, tmp_path: Path, workers: int
) -> None:
    bad = image_folder / "val" / "002" / "10.png"
    bad.write_bytes(bad.read_bytes()[:2000])
    ran = diffrate_cli(*eval_flags, "--workers", workers, "--json", tmp_path / "out.json")
    check_refused(ran, r"cannot read the image \S+/val/002/10\.png")
    assert not (tmp_path / "out.json").exists()


def test_more_classes_than_the_model(diffrate_cli: Cli, eval_flags: list[object], image_folder: Path) -> None:
    write_image(image_folder / "val" / "007" / "0.png", 0)
    check_refused(diffrate_cli(*eval_flags), "highest with index 7, but the model has only 3")


@pytest.mark.parametrize("flags", [["eval"], ["nonsense"], ["macs", "--model", "x", "--nonsense"]])
def test_usage_errors(diffrate_cli: Cli, flags: list[str]) -> None:
    ran = diffrate_cli(*flags)
    assert ran.code == 2
    assert "Usage: diffrate" in ran.err
    assert "Traceback" not in ran.err


def test_the_installed_program_fails_in_one_sentence(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("diffrate")
    done = subprocess.run(
        [program, "macs", "--model", "swin_tiny_patch4_window7_224", "--json", tmp_path / "out.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    check_refused(Ran(done.returncode, done.stdout, done.stderr), ".*[Ss]win")
    assert not (tmp_path / "out.json").exists()
