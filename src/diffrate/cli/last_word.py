"""The one sentence with which a command ends, also where a launcher ends it because another process has died.

Launchers send SIGTERM to who is left, often before its collective has failed. Python would answer only after the
collective has returned, which may be never: a thread answers.
"""

from __future__ import annotations

import os
import signal
import threading

import typer

from diffrate.processes import asked_to_stop

REFUSED = 2  # the exit code

_speaking = threading.Lock()  # the command and the thread may both want to have the last word
_said = threading.Event()


def say(sentence: str) -> None:
    with _speaking:
        typer.echo(_line(sentence), err=True)
        _said.set()


def answer_sigterm() -> None:
    """From now on SIGTERM ends this process, if it is one of several, with a sentence.

    Nothing is cleaned up, as nothing is without this: files are replaced whole, or not at all.
    """
    alone = os.environ.get("WORLD_SIZE", "1") == "1"  # launchers set it
    if alone or threading.current_thread() is not threading.main_thread():
        return
    _said.clear()  # by a command before this one
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: _end(wait=False))
    # Processes that read images die of it in silence, from the first moment on: it waits until they can.
    os.register_at_fork(
        before=lambda: _hold(signal.SIG_BLOCK),
        after_in_parent=lambda: _hold(signal.SIG_UNBLOCK),
        after_in_child=_forget,
    )
    threading.Thread(target=_watch, args=(reading,), daemon=True).start()


def _watch(signals: int) -> None:
    while os.read(signals, 1) != bytes([signal.SIGTERM]):
        pass
    _end(wait=True)


def _end(wait: bool) -> None:
    """wait  for what is being said to be said to its end; the main thread, which may be who says it, must not."""
    if not _speaking.acquire(blocking=wait):
        return
    try:
        if not _said.is_set():
            # Below a progress bar, and with the cursor that it hides.
            begin = "\033[?25h\n" if os.isatty(2) else ""
            os.write(2, f"{begin}{_line(asked_to_stop())}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(REFUSED)


def _hold(how: int) -> None:
    signal.pthread_sigmask(how, [signal.SIGTERM])


def _forget() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _hold(signal.SIG_UNBLOCK)


def _line(sentence: str) -> str:
    return f"Error: {' '.join(sentence.split())}"
