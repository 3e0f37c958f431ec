"""diffrate search as a command: its flags, images that it cannot read, and several processes."""

import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import diffrate
from conftest import TINY_FLAGS, check_refused, write_image
from diffrate.searching import fast


def folder_of_images(root):
    for i in range(24):
        write_image(root / f"{i:02d}.png", seed=i)
    return root


def test_command_on_a_folder_without_classes_skips_what_it_cannot_read(tmp_path, diffrate_cli):
    folder = folder_of_images(tmp_path / "images")
    (folder / "07.png").write_bytes(b"not an image")
    flags = [
        "--data-dir",
        str(folder),
        "--budget",
        "60%",
        "--steps",
        "4",
        "--batch-size",
        "8",
        "--workers",
        "0",
    ]
    done = diffrate_cli("search", *TINY_FLAGS, *flags, "--output", str(tmp_path / "run"), "--device", "cpu")
    assert done.code == 0, done.err
    assert "1 images could not be read" in done.err
    assert "07.png" in done.err
    assert (tmp_path / "run" / "schedule.json").is_file()


def test_a_search_names_what_it_wrote_and_takes_no_more_images_than_it_may(tmp_path, diffrate_cli):
    for label in "ab":
        folder_of_images(tmp_path / "images" / label)
    flags = [
        "search",
        *TINY_FLAGS,
        "--data-dir",
        str(tmp_path / "images"),
        "--steps",
        "2",
        "--batch-size",
        "4",
    ]
    flags += ["--workers", "0", "--device", "cpu", "--budget"]
    several, one = tmp_path / "several", tmp_path / "one"
    done = diffrate_cli(*flags, "70%,60%", "--images", "20", "--output", str(several))
    assert done.code == 0, done.err
    assert "the model has random weights" in done.err
    files = sorted(each.name for each in several.glob("schedule*.json"))
    assert len(files) == 2
    assert done.out.rstrip().endswith(f"; written to {several}: {files[1]}, {files[0]}")
    assert json.loads((several / "config.json").read_text())["images"] == 20
    missing = several / "schedule.json"
    with pytest.raises(
        diffrate.ScheduleError, match=f"{missing}: No such file.*; beside it are {', '.join(files)}$"
    ):
        diffrate.Schedule.load(missing)
    done = diffrate_cli(*flags, "60%", "--images", "1000", "--output", str(one))
    assert done.code == 0, done.err
    assert done.out.rstrip().endswith(f"; written to {one}: schedule.json")
    assert json.loads((one / "config.json").read_text())["images"] == 48


def test_flags_say_how_tokens_are_removed(tmp_path, diffrate_cli):
    for label in "abc":
        folder_of_images(tmp_path / "images" / label)
    flags = ["search", *TINY_FLAGS, "--data-dir", str(tmp_path / "images"), "--budget", "60%", "--steps", "4"]
    flags += ["--batch-size", "8", "--workers", "0", "--device", "cpu"]
    for name, more, wanted in [
        ("paper", ["--operator", "paper"], diffrate.Operator()),
        (
            "part",
            ["--operation", "prune-merge", "--floor", "1"],
            fast.OPERATOR.changed(operation="prune-merge", floor=1),
        ),
    ]:
        done = diffrate_cli(*flags, *more, "--output", str(tmp_path / name))
        assert done.code == 0, done.err
        found = diffrate.Schedule.load(tmp_path / name / "schedule.json")
        assert found.operator == wanted.changed(importance="class-attention")
        assert found.prune != found.merge
        merged = [p - m for p, m in zip(found.prune, found.merge, strict=True)]
        assert "merged tokens" in done.out
        assert re.search(" " + ",".join(map(str, merged)) + r"\n", done.out), done.out
        for entry in json.loads((tmp_path / name / "history.json").read_text())["steps"]:
            assert all(m <= p for p, m in zip(entry["left_by_pruning"], entry["kept"], strict=True))
        assert entry["left_by_pruning"] != entry["kept"]
    done = diffrate_cli(*flags, "--resume", "--output", str(tmp_path / "part"))
    assert done.code == 2
    assert "another operator, chooses_operator" in done.err
    for more, words in (
        (["--recipe", "paper", "--operator", "fast"], "masks tokens by rank"),
        (["--recipe", "paper", "--keep-norm"], "does not go with pruned_mass"),
        (["--operation", "merge-prune"], "choice cost merges after pruning"),
        (["--operator", "paper", "--floor", "1"], "floor goes with choice cost"),
    ):
        check_refused(diffrate_cli(*flags, *more, "--output", str(tmp_path / "no")), words)
        assert not (tmp_path / "no").exists()  # the name is free for what was meant
    done = diffrate_cli(*flags, "--operator", "ours", "--output", str(tmp_path / "no"))
    assert done.code == 2
    assert "operator must be one of paper, fast" in done.err


CROWDED = """
import runpy
from diffrate.searching import best_of_many
best_of_many.MOST, best_of_many.FEWEST, best_of_many.EFFORT = 16, 8, 100
runpy.run_module("diffrate", run_name="__main__")
"""


@pytest.mark.slow
def test_two_processes_find_what_one_finds(tmp_path, tiny_vit):
    for parameter in tiny_vit.parameters():  # as it is initialised, its logits hardly depend on the image
        torch.nn.init.normal_(parameter, std=0.3)
    save_file(tiny_vit.state_dict(), tmp_path / "weights.safetensors")
    folder = folder_of_images(tmp_path / "images")
    flags = ["--data-dir", folder, "--budget", "60%", "--steps", "6", "--batch-size", "8", "--workers", "0"]
    flags += ["--checkpoint", tmp_path / "weights.safetensors", "--device", "cpu"]
    crowded = tmp_path / "crowded.py"  # so that a search this short looks for where to begin as well
    crowded.write_text(CROWDED)
    command = [str(crowded), "search", *TINY_FLAGS, *map(str, flags)]
    launch = "-m accelerate.commands.launch --cpu --num_processes 2 --num_machines 1 --mixed_precision no"
    launch += " --dynamo_backend no --main_process_port 0"
    for name, words in {"one": command, "two": [*launch.split(), *command]}.items():
        done = subprocess.run(
            [sys.executable, *words, "--output", tmp_path / name], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    one, two = (diffrate.Schedule.load(tmp_path / name / "schedule.json") for name in ("one", "two"))
    assert one.merge == two.merge
    # Divergences here are about 4e-5, sums of fp32 logarithms in batches of other sizes.
    assert one.made["held_out_divergence"] == pytest.approx(
        two.made["held_out_divergence"], rel=1e-4, abs=1e-7
    )
