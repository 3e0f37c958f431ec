"""A sample of wrong and extreme values for the flags; `make attack` goes through every flag of every command."""

from pathlib import Path

import pytest

from attack.flags import Inputs, attack, commands, ready


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return ready(tmp_path_factory.mktemp("flags") / "inputs")


def test_every_command_is_attacked(inputs: Inputs) -> None:
    flags = 0
    for words, command in commands():
        assert isinstance(inputs.arguments(words), list)
        flags += len(command.params)
    assert flags > 350


@pytest.mark.slow
def test_wrong_and_extreme_values(inputs: Inputs, tmp_path: Path) -> None:
    found = attack(inputs, tmp_path, values=1, seed=11, every=37)
    assert found.ended.total() >= 10
    assert not found.defects


@pytest.mark.parametrize(
    ("command", "flags", "sentence"),
    [
        ("eval", ["--batch-size", "9" * 30], "1048576"),
        (
            "eval",
            ["--dataset", "imagnet"],
            "a dataset is named hfds/…, wds/…, torch/… or embedded, unlike 'imagnet'",
        ),
        ("eval", ["--split", ""], "has no split ''"),
        ("eval", ["--amp-dtype", "int8"], "amp dtype must be one of float16, bfloat16"),
        ("compare", ["--seed", "9" * 30], "--seed"),
        ("cosearch", ["--dram-pj", "1e308"], "--dram-pj"),
        ("cosearch", ["--resume"], "holds no co-search to resume"),
        ("bench", ["--plot", "new.xyz", "--accuracy", "uncompressed=70"], "which new.xyz does not end in"),
        ("export", ["--crop-pct", "-1"], "crop_pct is a fraction"),
        ("train", ["--min-lr", "1000000000"], "min_lr must be at most 100"),
        ("train", ["--max-minutes", "nan"], "--max-minutes"),
        ("segment train", ["--lr", "nan"], "lr must be from 0 to 100, not nan"),
        ("segment train", ["--backbone-lr", "inf"], "backbone_lr must be from 0 to 100"),
        ("segment train", ["--width", "9" * 30], "--width"),
    ],
)
def test_what_the_sweep_found(
    inputs: Inputs, tmp_path: Path, monkeypatch, diffrate_cli, command: str, flags: list[str], sentence: str
) -> None:
    """Each ended in a traceback, in NaN, or was passed over in silence."""
    monkeypatch.chdir(tmp_path)
    words = tuple(command.split())
    ran = diffrate_cli(*words, *inputs.arguments(words), *flags)
    assert ran.code == 2
    assert sentence in ran.err
    assert "Traceback" not in ran.err
    assert not list(tmp_path.iterdir())


def test_a_name_that_no_terminal_can_show(inputs: Inputs, tmp_path: Path, diffrate_cli) -> None:
    ran = diffrate_cli("compress", *inputs.arguments(("compress",)), "--output", tmp_path / "\udcff.json")
    assert ran.code == 0, ran.err
    assert r"\udcff.json: 4 blocks" in ran.out
    assert len(list(tmp_path.iterdir())) == 1
