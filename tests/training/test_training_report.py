"""What a training shows and logs: losses for a tracker, and lines with images per second and the time that is left."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from test_resume_and_parts import RECIPE, SCHEDULE, images, tune, vit
from torch import Tensor

from diffrate.training import Recipe, finetune
from diffrate.training import loop as training_loop
from diffrate.training.objective import Objective
from diffrate.training.report import Bar


class Notebook(GeneralTracker):
    """A tracker that keeps what it is told."""

    name, requires_logging_directory, main_process_only = "notebook", False, True

    def __init__(self) -> None:
        super().__init__(_blank=True)
        self.entries: list[dict[str, float]] = []

    @property
    def tracker(self) -> list[dict[str, float]]:
        return self.entries

    def store_init_configuration(self, values: dict[str, object]) -> None:
        pass

    def log(self, values: dict[str, float], step: int | None = None, **_: object) -> None:
        self.entries.append({"step": step, **values})


def test_trackers_get_the_curves(tmp_path: Path, fresh_accelerate: None) -> None:
    notebook = Notebook()
    accelerator = Accelerator(cpu=True, log_with=[notebook])
    accelerator.init_trackers("diffrate", {})
    trained = tune(tmp_path, accelerator=accelerator)
    assert [entry["step"] for entry in notebook.entries] == [2, 4, 6]
    for entry, epoch in zip(notebook.entries, trained.history, strict=True):
        assert (entry["epoch loss"], entry["accuracy"], entry["lr"]) == (
            epoch["loss"],
            epoch["accuracy"],
            epoch["lr"],
        )


def test_trackers_get_the_mean_loss_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_accelerate: None
) -> None:
    """Of the epoch, which has 5 steps here; an entry every 2 steps."""
    each = []

    class Watched(Objective):
        def __call__(self, *arguments: object) -> Tensor:
            loss = super().__call__(*arguments)
            each.append(loss.item())
            return loss

    monkeypatch.setattr(training_loop, "Objective", Watched)
    monkeypatch.setattr(training_loop, "LOG_STEPS", 2)
    notebook = Notebook()
    accelerator = Accelerator(cpu=True, log_with=[notebook])
    accelerator.init_trackers("diffrate", {})
    tune(tmp_path, replace(RECIPE, epochs=2, batch_size=4), accelerator=accelerator)
    assert len(each) == 10
    assert max(each) - min(each) > 1e-2  # or any mean of them would do
    expected = [(2, each[:2]), (4, each[:4]), (6, each[5:6]), (8, each[5:8]), (10, each[5:10])]
    logged = [(entry["step"], entry["loss"]) for entry in notebook.entries if "loss" in entry]
    assert logged == [(step, pytest.approx(sum(some) / len(some), rel=1e-12)) for step, some in expected]
    epochs = [(entry["step"], entry["epoch loss"]) for entry in notebook.entries if "epoch loss" in entry]
    assert epochs == [(5, pytest.approx(sum(each[:5]) / 5, rel=1e-12)), (10, logged[-1][1])]


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_lines_have_images_a_second_and_the_minutes_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, steps = Clock(), iter([12, 4, 4, 4, 25, 15, 4, 4])  # seconds: the first one compiles

    class Timed(Objective):
        def __call__(self, *arguments: object) -> Tensor:
            clock.now += next(steps)
            return super().__call__(*arguments)

    monkeypatch.setattr(training_loop, "Objective", Timed)
    monkeypatch.setattr(training_loop, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setenv("COLUMNS", "120")
    recipe = replace(RECIPE, epochs=4, batch_size=40, distillation=0.0)
    trained = finetune(vit(), SCHEDULE, images(80), images(10), tmp_path, recipe)
    lines = capsys.readouterr().err.splitlines()
    found = [re.match(r"epoch +(\d)/4 .* (\S+) s, (\S+) images/s, (\S+) min left$", line) for line in lines]
    # 80 images an epoch; the quickest one so far for each that is left.
    assert [line and line.groups() for line in found] == [
        ("1", "16.0", "5", "0.8"),  # 16 s for each of three
        ("2", "8.0", "10", "0.3"),  # 8 s for each of two
        ("3", "40.0", "2", "0.1"),  # the slow epoch says nothing about the next
        ("4", "8.0", "10", "0.0"),
    ]
    assert [epoch["seconds"] for epoch in trained.history] == [16, 8, 40, 8]
    assert trained.seconds == 72


def test_the_bar_has_images_a_second_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("rich.console.monotonic", clock)
    bar = Bar(True, Recipe(epochs=10, batch_size=512), 50)
    (task,) = bar.bar.tasks
    assert task.total == 500
    bar.advance()
    assert task.fields["pace"] == ""  # one step has no pace yet
    for _ in range(20):
        clock.now += 0.25
        bar.advance()
    assert task.fields["pace"] == "2,048 images/s"  # 512 in a quarter of a second
    assert task.time_remaining == 120  # (500 - 21) / 4, rounded up
    for _ in range(100):  # as it was half a minute ago counts no more
        clock.now += 1
        bar.advance()
    assert task.fields["pace"] == "512 images/s"
    assert task.time_remaining == 379


@pytest.mark.parametrize("call", [2, 4])  # in the middle of the first epoch and of the second
def test_a_resumed_run_knows_how_long_an_epoch_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: int
) -> None:
    """An epoch of two steps, one of them before the interruption, took the time of both."""
    clock, calls, bars = Clock(), [], []

    class Timed(Objective):
        def __call__(self, *arguments: object) -> Tensor:
            calls.append(1)
            if len(calls) == call:
                raise KeyboardInterrupt
            clock.now += 30
            return super().__call__(*arguments)

    class Watched(Bar):
        def __exit__(self, *error: object) -> None:
            (task,) = self.bar.tasks
            bars.append((task.completed, task.total))
            super().__exit__(*error)

    monkeypatch.setattr(training_loop, "Objective", Timed)
    monkeypatch.setattr(training_loop, "Bar", Watched)
    monkeypatch.setattr(training_loop, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setenv("COLUMNS", "120")
    data = (SCHEDULE, images(), images(10), tmp_path, replace(RECIPE, epochs=4, distillation=0.0))
    with pytest.raises(KeyboardInterrupt):
        finetune(vit(), *data, save_minutes=0)
    clock.now += 1000  # until somebody noticed
    trained = finetune(vit(), *data, resume=True)
    assert [epoch["seconds"] for epoch in trained.history] == [60, 60, 60, 60]
    assert re.findall(r"(\S+) min left", capsys.readouterr().err) == ["3.0", "2.0", "1.0", "0.0"]
    assert trained.seconds == 240
    assert bars == [(call - 1, 8), (8, 8)]


def test_a_line_of_a_log_stays_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    epoch = {"loss": 4.1234, "accuracy": 71.23, "seconds": 1234.5}
    Bar(True, Recipe(epochs=300), 1251).epoch(10, [epoch], 12345)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("1234.5 s, 12,345 images/s, 5966.8 min left")  # 290 epochs of 1234.5 s
