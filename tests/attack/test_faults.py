"""Kills, full disks and second runs: what is on disk is whole, and a resumed run ends where an undisturbed one does."""

import os
import signal
import threading
from pathlib import Path

import pytest
from accelerate import Accelerator

from attack import disk
from attack.flags import Inputs, ready
from attack.interruptions import ctrl_c, dead_workers
from attack.kill import JOBS, apart, attack, go_on, result, same, start, with_small_files
from conftest import TINY_FLAGS, check_refused
from diffrate.errors import DiffRateError
from diffrate.run_folder import RunFolder
from diffrate.schedule import write_text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "processes"), [("search", 1), ("finetune", 1), ("search", 2), ("finetune", 2), ("cosearch", 2)]
)
def test_killed_runs_resume_to_the_same_result(name: str, processes: int, tmp_path: Path) -> None:
    found = attack(name, tmp_path, kills=1, processes=processes, seed=5)
    assert found["kills"] == 1
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
    with pytest.raises(
        DiffRateError, match=r"already holds a search: resume it \(--resume\), or choose another folder"
    ):
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


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return ready(tmp_path_factory.mktemp("inputs") / "inputs")


@pytest.mark.slow
def test_what_cannot_be_written_is_refused(inputs: Inputs, tmp_path: Path) -> None:
    some = ("compress", "search", "cosearch", "finetune", "export", "report", "visualize", "segment eval")
    found = disk.read_only(inputs, tmp_path, only=some)
    assert found.ended == {"refused": len(some)}, found.defects


@pytest.mark.slow
@pytest.mark.skipif(not disk.can_mount(), reason="a small disk can be mounted by root alone")
def test_a_full_disk_is_a_sentence(inputs: Inputs, tmp_path: Path) -> None:
    some = ("search", "cosearch", "finetune", "export", "report", "visualize")
    found = disk.full(inputs, tmp_path, rooms=[12], only=some)
    assert found.ended.total() == len(some)
    assert found.ended["refused"] >= 4
    assert not found.defects


@pytest.mark.slow
def test_a_dead_worker_is_a_sentence(inputs: Inputs, tmp_path: Path) -> None:
    found = dead_workers(inputs, tmp_path, only=["finetune", "eval"])
    assert found.ended == {"refused": 2}, found.defects


@pytest.mark.slow
def test_ctrl_c_ends_a_command_in_order(inputs: Inputs, tmp_path: Path) -> None:
    found = ctrl_c(inputs, tmp_path, each=2, only=["train"])
    assert found.ended.total() == 2
    assert not found.defects


def test_a_second_run_beside_the_first_is_refused(tmp_path: Path) -> None:
    """A process that holds the folder, and a second one that would resume what is not interrupted."""
    JOBS["search"](tmp_path / "run", False)
    (told, ready_), (read, tell) = os.pipe(), os.pipe()

    def first() -> None:
        folder = RunFolder(tmp_path / "run", {}, True, Accelerator(cpu=True), "search")
        os.write(ready_, b"x")
        os.read(read, 1)
        del folder

    (child,) = start(first)
    os.read(told, 1)
    with pytest.raises(DiffRateError, match=r"another search is at work in .*run: wait for it"):
        JOBS["search"](tmp_path / "run", True)
    os.write(tell, b"x")
    assert os.waitpid(child, 0)[1] == 0
    JOBS["search"](tmp_path / "run", True)  # nobody is there any more


def test_a_pipe_is_not_waited_for(tmp_path: Path, diffrate_cli) -> None:
    os.mkfifo(tmp_path / "pipe")
    check_refused(diffrate_cli("macs", *TINY_FLAGS, "--schedule", tmp_path / "pipe"), ".* is not a file")
