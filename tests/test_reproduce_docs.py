"""What the files of reproduce/ say of themselves: commands exist and feed the page, figures are in results/."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "reproduce"
PARTS = {
    "setting",
    "many_schedules",
    "turns",
    "markdown_table",
    "in_short",
    "ranks",
    "what_was_run",
    "kernels_alone",
}  # of other files
WRITERS = {"page", "speed_table", "training_tables"}  # of pages: they measure nothing
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}

EXPERIMENTS = sorted(FILES.keys() - PARTS - WRITERS)

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="reproduce/ is part of a checkout, not of the package"
)


def doc(name: str) -> str:
    return ast.get_docstring(ast.parse(FILES[name].read_text(encoding="utf-8"))) or ""


def commands(name: str) -> list[list[str]]:
    """The commands in the docstring of a file, as a shell reads them."""
    lines = re.sub(r"\\\n\s*", " ", doc(name)).splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("    python ")]


def numbers(value: Any) -> Iterator[float]:
    """Every number in a record, lengths of lists among them."""
    if isinstance(value, dict | list):
        yield len(value)
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, float | int) and not isinstance(value, bool):
        yield value


def unfounded(sentence: str, records: list[Any]) -> list[str]:
    """The figures in a sentence that are in no record, rounded as they are in the sentence."""
    known = {float(number) for record in records for number in numbers(record)}
    said = re.findall(r"(?<![\w./-])[-+]?\d[\d,]*(?:\.\d+)?(?![\w/])", sentence)
    return [
        each
        for each in said
        if not any(
            abs(number - float(each.replace(",", ""))) <= 0.5001 * 10 ** -len(each.partition(".")[2])
            for number in known
        )
    ]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_file_says_what_was_measured_with_figures_from_its_results(name: str) -> None:
    _, found, rest = doc(name).partition("Measured here: ")
    assert found, "say what was measured, or that it was not run"
    sentence = " ".join(rest.partition("\n\n")[0].split())
    files = re.findall(r"(?:results|tests)/[\w./]+\.(?:json|png)", sentence)
    assert files or "not run" in sentence
    for file in files:
        assert (ROOT / file).is_file(), file
    records = [json.loads((ROOT / file).read_text()) for file in files if file.endswith(".json")]
    said = re.sub(r"(?:results|tests)/[\w./]+", "", sentence)
    assert not unfounded(said, records)


def test_an_invented_figure_is_noticed() -> None:
    record = {"rows": [{"top1": 72.449, "images": 2000, "loss_rise": -0.0312}]}
    assert unfounded("ViT-Ti has 72.45 on 2,000 images, an H200, -0.031.", [record]) == []
    assert unfounded("It has 72.46 on 2,001 images; 0.031.", [record]) == ["72.46", "2,001", "0.031"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_commands_exist_and_write_where_the_page_looks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    run = importlib.import_module("what_was_run")
    read = ["reproduce_*.json", *(f"{each.key}.json" for each in run.EXPERIMENTS)]
    assert commands(name) or name == "paper_tables"
    for words in commands(name):
        script = ROOT / words[1]
        assert script.is_file()
        text = script.read_text(encoding="utf-8")
        if "shared.parser(" in text or "from setting import" in text:
            text += FILES["setting"].read_text(encoding="utf-8")
        for flag in [word for word in words if word.startswith("--")]:
            assert f'"{flag.replace("--no-", "--")}"' in text, flag
        if "--json" in words:
            folder, _, file = words[words.index("--json") + 1].partition("/")
            assert folder == "results"
            assert any(fnmatch(file, pattern) for pattern in read), file


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_file_says_what_it_costs(name: str) -> None:
    assert "Cost: " in doc(name) or name == "paper_tables"


def test_every_file_is_in_the_list() -> None:
    listed = set(re.findall(r"`(\w+)\.py", (FOLDER / "README.md").read_text(encoding="utf-8")))
    assert listed >= FILES.keys()
