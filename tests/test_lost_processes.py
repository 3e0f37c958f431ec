"""What the others say when one of several processes dies."""

import subprocess
import sys
from pathlib import Path

import pytest

from diffrate.errors import DiffRateError
from diffrate.processes import together

LOST = "[../gloo/transport/tcp/pair.cc:553] Read error: Connection closed by peer. Good luck!\nand more"


def test_a_lost_process_is_named_with_the_way_on(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    with (
        pytest.raises(DiffRateError, match=r"another process of this search .*by peer.*no state was saved"),
        together(2, "search", state),
    ):
        raise RuntimeError(LOST)
    state.write_text("{}")
    with (
        pytest.raises(DiffRateError, match=f"--resume goes on from {state}") as said,
        together(2, "search", state),
    ):
        raise RuntimeError(LOST)
    assert "(Read error: Connection closed by peer); --resume" in str(said.value)


@pytest.mark.parametrize(("processes", "text"), [(1, LOST), (2, "shapes do not match")])
def test_other_errors_stay_what_they_are(processes: int, text: str) -> None:
    with pytest.raises(RuntimeError, match=text[:9].replace("[", r"\[")), together(processes, "search", None):
        raise RuntimeError(text)


def test_a_thread_that_hands_images_to_a_process_which_is_gone_says_nothing() -> None:
    """What else is uncaught is shown, and so is that in the main thread."""
    program = """
import multiprocessing.connection, sys, threading
from diffrate.cli.app import main
sys.argv = ["diffrate", "schedules"]
try:
    main()
except SystemExit:
    pass

def uncaught(error):  # as multiprocessing's own threads do it
    try:
        raise error
    except Exception:
        sys.excepthook(*sys.exc_info())

for error in (ConnectionResetError("gone"), ValueError("a mistake")):
    thread = threading.Thread(target=uncaught, args=(error,))
    thread.start()
    thread.join()
uncaught(ConnectionResetError("here"))
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr
    assert "gone" not in said
    assert "ValueError: a mistake" in said
    assert "ConnectionResetError: here" in said


def test_a_loader_whose_process_died_while_it_was_made_ends_the_command_at_once() -> None:
    """It may wait for ever where it is put away, and a thread of it fails where its start was broken off."""
    program = """
import threading, time
from diffrate.cli import app

class Loader:
    def __del__(self):
        time.sleep(600)

class Other:
    def __del__(self):
        raise ValueError("a mistake")

def half_made():
    loader = Loader()
    Other()
    thread = threading.Thread(target=print)
    threading._start_new_thread(thread._bootstrap, ())  # as if start() had been broken off: it is in no list
    time.sleep(0.5)
    raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

app._run = half_made
app.main()
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 2
    assert ran.stderr.splitlines()[-1].startswith("Error: a process that reads images has died")
    assert ran.stderr.count("Traceback") == 1
    assert "ValueError: a mistake" in ran.stderr
