"""Results files: whole or not at all, and with their origin."""

from __future__ import annotations

import json
import math
import subprocess
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import diffrate
from diffrate.devices import device_name, resolve_device
from diffrate.errors import DiffRateError
from diffrate.results import check_target, commit, write_results


def test_a_record_names_its_origin(tmp_path: Path) -> None:
    write_results(tmp_path / "deep" / "out.json", "diffrate something", {"top1": 75.25})
    record = json.loads((tmp_path / "deep" / "out.json").read_text())
    assert record["results"] == {"top1": 75.25}
    assert record["command"] == "diffrate something"
    assert record["diffrate"] == diffrate.__version__ == version("diffrate")
    assert record["torch"] == torch.__version__
    assert record["timm"] == version("timm")
    assert record["device"] == device_name(torch.device("cpu"))
    age = datetime.now(timezone.utc) - datetime.fromisoformat(record["date"])
    assert abs(age.total_seconds()) < 60


def test_commit_is_that_of_the_checkout() -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip("the tests do not run from a git checkout")
    assert commit() is not None
    assert str(commit()).removesuffix("-dirty") == done.stdout.strip()


def test_failed_writes_leave_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_results(path, "first", {"loss": 1.0})
    before = path.read_text()
    for bad in ({"loss": math.nan}, {"loss": object()}):
        with pytest.raises((ValueError, TypeError)):
            write_results(path, "second", bad)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_targets_that_cannot_be_written_are_found_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_target(None)
    check_target(tmp_path / "new" / "folder" / "out.json")
    for target in (tmp_path, tmp_path / "file" / "out.json"):
        with pytest.raises(DiffRateError, match="cannot write"):
            check_target(target)
    assert not (tmp_path / "new").exists()


def test_devices_by_name() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device().type in ("cpu", "cuda")
    for name in ("nonsense", "cuda:99"):
        with pytest.raises(DiffRateError, match=f"device {name} cannot be used"):
            resolve_device(name)
