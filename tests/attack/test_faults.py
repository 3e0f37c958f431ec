"""Kills, full disks and second runs: what is on disk is whole, and a resumed run ends where an undisturbed one does."""

import os
import signal
import threading
from pathlib import Path

import pytest

from attack.kill import JOBS, apart, attack, go_on, result, same, with_small_files
from conftest import TINY_FLAGS, check_refused
from diffrate.errors import DiffRateError
from diffrate.schedule import write_text


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", JOBS)
def test_killed_runs_resume_to_the_same_result(name: str, processes: int, tmp_path: Path) -> None:
    found = attack(name, tmp_path, kills=2, processes=processes, seed=5)
    assert found["kills"] == 2
    assert found["survivors_with_a_sentence"] + found["survivors_stopped"] == found["survivors"]
    assert found["runs_with_the_undisturbed_result"] == found["runs"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("search", 300), ("finetune", 20_000)])
def test_a_full_disk_leaves_nothing_half_written(name: str, most: int, tmp_path: Path) -> None:
    assert with_small_files(JOBS[name], tmp_path / "run", most) == 2
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in left if path.name.startswith(".")] == []
    assert go_on(JOBS[name], tmp_path / "run") == [0]  # there is room again
    assert go_on(JOBS[name], tmp_path / "whole") == [0]
    assert same(result(tmp_path / "run"), result(tmp_path / "whole"))


def test_a_second_run_into_the_same_folder_is_refused(tmp_path: Path) -> None:
    assert go_on(JOBS["search"], tmp_path) == [0]
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DiffRateError, match="already holds a search: resume it, or choose another folder"):
        JOBS["search"](tmp_path, False)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["pipe", "folder", "x" * 5000])
def test_what_is_no_file_is_never_replaced(name: str, tmp_path: Path, diffrate_cli) -> None:
    """As root, moving a file over /dev/null would succeed."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    check_refused(diffrate_cli("macs", *TINY_FLAGS, "--json", tmp_path / name), "cannot write")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]
    if len(name) < 10:
        with pytest.raises((DiffRateError, ValueError)):
            write_text(tmp_path / name, "text")


@pytest.mark.slow
def test_interrupted_twice_from_the_keyboard(tmp_path: Path) -> None:
    """The second Ctrl-C falls into what the first one started; what is on disk is whole, and the run resumes."""
    assert go_on(JOBS["search"], tmp_path / "whole") == [0]

    def interrupted() -> None:
        for after in (0.4, 0.401):
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)).start()
        JOBS["search"](tmp_path / "run", False)

    assert apart(interrupted) in (130, 0)
    assert not list(tmp_path.rglob(".*"))
    assert go_on(JOBS["search"], tmp_path / "run") == [0]
    assert same(result(tmp_path / "run"), result(tmp_path / "whole"))


def test_a_pipe_is_not_waited_for(tmp_path: Path, diffrate_cli) -> None:
    os.mkfifo(tmp_path / "pipe")
    check_refused(diffrate_cli("macs", *TINY_FLAGS, "--schedule", tmp_path / "pipe"), ".* is not a file")
