"""A sample of wrong and extreme values for the flags; `make attack` goes through every flag of every command."""

from pathlib import Path

import pytest

from attack.flags import Inputs, attack, commands, ready


def test_every_command_is_attacked(tmp_path: Path) -> None:
    inputs, flags = Inputs(tmp_path), 0
    for words, command in commands():
        assert isinstance(inputs.arguments(words), list)
        flags += len(command.params)
    assert flags > 350


@pytest.mark.slow
def test_wrong_and_extreme_values(tmp_path: Path) -> None:
    found = attack(ready(tmp_path / "inputs"), tmp_path, values=1, seed=11, every=37)
    assert found.ended.total() >= 10
    assert not found.defects
