"""SIGTERM to one of several processes: one sentence, wherever it comes and whatever else is being said.

Each test runs the command line in a process of its own, with a body in the place of the commands.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from diffrate import processes
from diffrate.cli import app, last_word
from diffrate.processes import together

ASKED = r"Error: this search was asked to stop \(SIGTERM\), as launchers do when another process of it has ended; "
LOST = r"Error: another process of this search has ended \(.*onnection closed by peer.*\); "
ON = r"--resume goes on from state\.json\n"
STATE = Path("state.json")
WAIT = 60  # seconds for a process to end

Body = Callable[[], object]


class Process:
    """One of two processes, as a launcher would have started it; it says when it may be disturbed."""

    def __init__(self, folder: Path, body: Body, world: int = 2, early: Body = lambda: None) -> None:
        folder.mkdir(exist_ok=True)
        self.errors = folder / "stderr"
        self.readable, self.writable = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of newer Pythons, about forks
            self.pid = os.fork()
        if self.pid == 0:
            self._run(folder, body, world, early)
        os.close(self.writable)
        self.code: int | None = None

    def _run(self, folder: Path, body: Body, world: int, early: Body) -> None:
        global here
        here, code = self, 1
        try:
            os.setsid()
            os.chdir(folder)
            STATE.touch()
            os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            os.environ["WORLD_SIZE"] = str(world)
            processes._under_way = None  # what other tests have left
            last_word._said.set()
            early()
            app._run = body
            app.main()
        except SystemExit as error:
            code = int(error.code or 0)
            if body in (speak_slowly, finish_slowly):
                held()
        finally:
            os._exit(code)

    def wait_until_ready(self) -> Process:
        assert os.read(self.readable, 1), self.errors.read_text()
        time.sleep(0.2)  # from saying so to being held
        return self

    def send(self, number: int) -> Process:
        os.kill(self.pid, number)
        return self

    def ended(self) -> tuple[int, str]:
        """Its exit code and what it said; a process that does not end is a failure."""
        until = time.monotonic() + WAIT
        while self.code is None and time.monotonic() < until:
            child, status = os.waitpid(self.pid, os.WNOHANG)
            if child:
                self.code = os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        assert self.code is not None, "it did not end"
        return self.code, self.errors.read_text()

    def clear(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.readable)


here: Process  # in the process itself


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    running: list[Process] = []

    def started(body: Body, **options: Any) -> Process:
        running.append(Process(tmp_path, body, **options))
        return running[-1]

    yield started
    for process in running:
        process.clear()


def ready() -> None:
    os.write(here.writable, b"!")


def held() -> None:
    """In C for ever, as in a collective: no handler of Python runs."""
    ready()
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def busy() -> None:
    ready()
    while True:
        pass


def asleep() -> None:
    ready()
    time.sleep(600)


def searching(body: Body, state: Path = STATE) -> Body:
    def search() -> None:
        with together(2, "search", state):
            body()

    return search


def lose() -> None:
    with together(2, "search", STATE):
        raise RuntimeError("gloo: Connection closed by peer")


def check(process: Process, sentence: str) -> None:
    code, said = process.ended()
    assert code == 2
    assert re.fullmatch(sentence, said), said


@pytest.mark.parametrize("where", [held, busy, asleep])
def test_a_process_asked_to_stop_says_so(where: Body, start: Callable[..., Process]) -> None:
    check(start(searching(where)).wait_until_ready().send(signal.SIGTERM), ASKED + ON)


def test_where_no_state_was_saved_none_is_promised(start: Callable[..., Process]) -> None:
    process = start(searching(held, Path("none.json"))).wait_until_ready().send(signal.SIGTERM)
    check(process, ASKED + "no state was saved yet\n")


def test_after_a_run_nothing_is_said_of_it(start: Callable[..., Process]) -> None:
    def body() -> None:
        searching(lambda: None)()
        held()

    check(
        start(body).wait_until_ready().send(signal.SIGTERM), r"Error: this run was asked to stop [^;]*ended\n"
    )


def lose_and_wait() -> None:
    try:
        lose()
    finally:
        held()


def speak_slowly() -> None:
    def echo(line: str, err: bool) -> None:
        assert err
        os.write(2, line[:20].encode())
        ready()
        time.sleep(1)
        os.write(2, f"{line[20:]}\n".encode())

    mock.patch.object(last_word.typer, "echo", echo).start()  # to the end of this process
    lose()


def finish_slowly() -> None:
    lose()  # what Python does at the end hangs, here and above


@pytest.mark.parametrize(
    ("body", "sentence"),
    [(lose_and_wait, ASKED), (speak_slowly, LOST), (finish_slowly, LOST)],
    ids=["before", "amid", "after"],
)
def test_a_lost_process_and_sigterm_make_one_sentence(
    body: Body, sentence: str, start: Callable[..., Process]
) -> None:
    """Before the sentence is said, in the middle of it, and after it."""
    check(start(body).wait_until_ready().send(signal.SIGTERM), sentence + ON)


def test_sigterm_comes_before_what_the_death_of_a_reader_raises(start: Callable[..., Process]) -> None:
    """Launchers ask the whole group, also processes that read images, of whose death torch makes an error."""

    def body() -> None:
        def died(*_: object) -> None:
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated")

        signal.signal(signal.SIGCHLD, died)
        if os.fork() == 0:
            time.sleep(600)
        sys.setswitchinterval(10)  # so that the thread comes too late
        busy()

    for _ in range(5):
        process = start(searching(body)).wait_until_ready()
        os.killpg(process.pid, signal.SIGTERM)
        check(process, ASKED + ON)
        process.errors.unlink()


@pytest.mark.parametrize("when", ["in the fork", "later", "with a handler of its own"])
def test_a_forked_process_dies_of_sigterm_in_silence(when: str, start: Callable[..., Process]) -> None:
    """What a child is asked, or that it ended, does not end its parent."""

    def terminate() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def early() -> None:
        if when == "in the fork":
            os.register_at_fork(after_in_child=terminate)  # before our own

    def body() -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)  # as torch does
        child = os.fork()
        if child == 0:
            if when == "with a handler of its own":
                signal.signal(signal.SIGTERM, lambda *_: os._exit(signal.SIGTERM))
            terminate()
            held()
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (-signal.SIGTERM, signal.SIGTERM):
            time.sleep(0.3)  # in which nothing must reach this one
            held()

    process = start(searching(body), early=early).wait_until_ready()
    assert process.errors.read_text() == ""
    check(process.send(signal.SIGTERM), ASKED + ON)


@pytest.mark.parametrize(
    ("sent", "world", "code"), [(signal.SIGINT, 2, 130), (signal.SIGTERM, 1, -signal.SIGTERM)]
)
def test_ctrl_c_and_a_process_alone_stay_as_they_were(
    sent: int, world: int, code: int, start: Callable[..., Process]
) -> None:
    process = start(searching(busy), world=world).wait_until_ready().send(sent)
    assert process.ended() == (code, "")


def test_the_library_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with together(2, "search", None):
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("asked", [True, False])
def test_a_collective_that_waits_for_a_process(asked: bool, tmp_path: Path) -> None:
    """The other one hangs, and this one is asked to stop while it waits; or the other one dies first."""

    def meet(rank: int) -> Body:
        def body() -> None:
            dist.init_process_group(
                "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=rank, world_size=2
            )
            dist.all_reduce(torch.ones(1))
            if rank == 1:
                held()
            ready()
            dist.all_reduce(torch.ones(1))

        return searching(body)

    waiting, other = (Process(tmp_path / str(rank), meet(rank)) for rank in range(2))
    try:
        other.wait_until_ready()
        waiting.wait_until_ready()
        _ = waiting.send(signal.SIGTERM) if asked else other.send(signal.SIGKILL)
        check(waiting, (ASKED if asked else LOST) + ON)
    finally:
        waiting.clear()
        other.clear()
