"""What the documentation tells people to type: cheap commands and code run, all others must parse."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed.run
import typer
from accelerate.commands.launch import launch_command_parser
from safetensors.torch import save_file
from torch import nn

import diffrate
from conftest import TINY_FLAGS, Ran, write_image
from diffrate.cli.app import app
from diffrate.methods.dynamicvit import DynamicViT

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
FENCED = re.compile(
    r"^(?:<!-- (?P<mark>[^>]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE
)
INLINE = re.compile(r"`(diffrate [a-z][^`\n]*)`")
LAUNCHED = re.compile(r"`((?:torchrun|accelerate launch) [^`\n]*)`")
RUN = {"schedules", "macs", "compress", "models", "methods"}  # commands that need no data and little time
MAKE = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


class Block(NamedTuple):
    page: str
    mark: str
    language: str
    text: str


BLOCKS = [
    Block(page.name, found["mark"] or "", found["language"], found["text"])
    for page in PAGES
    for found in FENCED.finditer(page.read_text(encoding="utf-8"))
]


SHELL = re.compile(
    r"(?:#.*\n)*(?:[A-Z_]+=\S+ )?(?:diffrate|make|pip|python|curl|uvicorn|torchrun|accelerate) "
)


def shell_lines(block: Block) -> list[list[str]]:
    """The lines of a block of commands as a shell reads them: continued ones joined, comments gone."""
    if block.language not in ("", "bash", "sh") or not SHELL.match(block.text):
        return []
    lines = re.sub(r"\\\n\s*", " ", block.text).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def as_parameters(found: dict[str, str]) -> list[Any]:
    return [pytest.param(shlex.split(line)[1:], id=f"{page}: {line[:90]}") for line, page in found.items()]


def commands() -> list[Any]:
    """Every `diffrate …` in a block of commands, once."""
    found = {shlex.join(words): b.page for b in BLOCKS for words in shell_lines(b) if words[0] == "diffrate"}
    return as_parameters(found)


def mentions() -> list[Any]:
    """Every `diffrate …` inside a sentence, once."""
    found = {line: page.name for page in PAGES for line in INLINE.findall(page.read_text(encoding="utf-8"))}
    return as_parameters(found)


def launched() -> list[Any]:
    """Every `torchrun … -m diffrate …`, or with accelerate, in a block of commands or inside a sentence, once."""
    found = {line: page.name for page in PAGES for line in LAUNCHED.findall(page.read_text(encoding="utf-8"))}
    found |= {
        shlex.join(words): block.page
        for block in BLOCKS
        for words in shell_lines(block)
        if words[0] in ("torchrun", "accelerate")
    }
    return [pytest.param(shlex.split(line), page, id=f"{page}: {line[:90]}") for line, page in found.items()]


def given_to_diffrate(words: list[str]) -> list[str]:
    """What the launcher, by its own parser, hands to the module that it starts."""
    if words[0] == "torchrun":
        read = torch.distributed.run.get_args_parser().parse_args(words[1:])
    else:
        assert words[1] == "launch"
        read = launch_command_parser().parse_args(words[2:])
    assert (read.module, read.training_script) == (True, "diffrate")
    return list(read.training_script_args)


def with_the_rest(words: list[str], page: str) -> list[str]:
    """The command with the flags that its … stands for: those of a whole command of that name, on its page if any."""
    whole = [
        (block.page != page, found[2:])
        for block in BLOCKS
        for found in shell_lines(block)
        if found[:2] == ["diffrate", words[0]] and "…" not in found
    ]
    flags = min(whole, key=lambda each: each[0])[1]
    return [part for word in words for part in (flags if word == "…" else [word])]


def problem_with(words: list[str], whole: bool = True) -> str | None:
    """What is wrong with the words after `diffrate`, or None; of a part of a command, only what is there."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {
        "--help"
    }
    unknown = [word for word in words if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]
    if unknown:
        return f"there is no flag {', '.join(unknown)}"
    if not whole or "…" in words:
        return None
    try:
        command.make_context(command.name, list(words))
    except Exception as error:  # click's own kinds, all of which mean that the command would not start
        explain = getattr(error, "format_message", None)
        return explain() if explain else str(error)
    return None


def test_there_is_something_to_check() -> None:
    assert len(commands()) > 20
    assert len(mentions()) > 10
    assert [each.values[1] for each in launched()].count("cluster.md") >= 4
    assert {block.page for block in BLOCKS} >= {"README.md", "index.md", "export.md", "guide_practitioner.md"}


@pytest.mark.parametrize("words", commands())
def test_commands_parse(words: list[str]) -> None:
    assert problem_with(words) is None


@pytest.mark.parametrize(("words", "page"), launched())
def test_launched_commands_parse(words: list[str], page: str) -> None:
    """Flags of the launcher by the launcher's parser, the rest by ours, with … filled in."""
    assert problem_with(with_the_rest(given_to_diffrate(words), page)) is None


def test_a_wrong_launch_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        given_to_diffrate(["torchrun", "--nods", "4", "-m", "diffrate", "finetune"])
    assert "nods" in capsys.readouterr().err
    words = given_to_diffrate(shlex.split("torchrun --nnodes 4 -m diffrate finetune … --batch 4096"))
    assert words == ["finetune", "…", "--batch", "4096"]
    assert problem_with(with_the_rest(words, "cluster.md")) == "there is no flag --batch"
    words[-2:] = ["--batch-size", "many"]
    assert "--batch-size" in str(problem_with(with_the_rest(words, "cluster.md")))


@pytest.mark.parametrize("words", mentions())
def test_mentioned_commands_and_flags_exist(words: list[str]) -> None:
    assert problem_with(words, whole=False) is None


def known_flags(command: Any) -> set[str]:
    inner = getattr(command, "commands", {}).values()
    own = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    return own.union({"--help"}, *map(known_flags, inner))


def test_flags_by_themselves_exist() -> None:
    """`--flag value` in a sentence belongs to some command."""
    known = known_flags(typer.main.get_command(app))
    for page in PAGES:
        for span in re.findall(r"`(--[a-z][^`\n]*)`", page.read_text(encoding="utf-8")):
            for flag in re.findall(r"--[a-z][a-z-]*", span):
                assert flag in known, f"{page.name}: {span}"


def test_a_wrong_command_is_noticed() -> None:
    assert problem_with(["eval", "--model", "x", "--sheduel", "y"]) == "there is no flag --sheduel"
    assert problem_with(["evaluate"]) == "there is no command evaluate"
    assert problem_with(["segment", "eval", "…", "--budge", "80%"]) == "there is no flag --budge"
    assert "batch-size" in str(problem_with(["eval", "--model", "x", "--batch-size", "many"]))
    assert "--output" in str(problem_with(["compress", "--model", "x"]))


@pytest.mark.parametrize("words", [each for each in commands() if each.values[0][0] in RUN])
def test_cheap_commands_run(
    words: list[str], diffrate_cli: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = diffrate_cli(*words)
    assert ran.code == 0, ran.err
    assert ran.out or list(tmp_path.iterdir())


@pytest.fixture
def tiny_world(
    tmp_path: Path, tiny_vit: nn.Module, checkpoint: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder in which the files that the documentation names exist, for a tiny model."""
    for seed in range(12, 24):  # a search wants more images than an evaluation
        write_image(image_folder / "val" / "000" / f"{seed}.png", seed)
    for name in ("imagenet", "labelled"):
        (tmp_path / name).symlink_to(image_folder)
    for name in ("tiny.json", "runs/tiny/schedule.json", "runs/mine/schedule.json"):
        diffrate.Schedule((17, 14, 10, 3), (17, 12, 8, 3)).save(tmp_path / name)
    tuned = tmp_path / "runs" / "deit_small" / "weights.safetensors"
    tuned.parent.mkdir(parents=True)
    tuned.write_bytes(checkpoint.read_bytes())
    trained, selecting = tmp_path / "runs" / "dynamicvit", DynamicViT(tiny_vit, 0.7)
    trained.mkdir()
    (trained / "config.json").write_text(json.dumps({"method": selecting.settings()}))
    save_file(selecting.state_dict(), trained / "weights.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_the_tiny_world(words: list[str]) -> list[str]:
    """The same command for the tiny model, with few steps."""
    at = words.index("--model")
    few = {
        "eval": ["--workers", "0"],
        "search": ["--steps", "2", "--workers", "0"],
        "bench": ["--repeats", "4"],
    }
    words = [*words[:at], *TINY_FLAGS, *words[at + 2 :], *few[words[0]], "--device", "cpu"]
    words = ["tiny.json" if word.startswith("published:") else word for word in words]
    return [
        word + "-new" if before == "--output" else word
        for before, word in zip(["", *words], words, strict=False)
    ]


def fits_the_tiny_world(words: list[str]) -> bool:
    if words[0] not in ("eval", "search", "bench") or "…" in words or "--dtype" in words:
        return False
    budget = words[words.index("--budget") + 1] if "--budget" in words else "50%"
    return "G" not in budget and "ms" not in budget and words.count("--model") == 1


@pytest.mark.slow
@pytest.mark.parametrize("words", [each for each in commands() if fits_the_tiny_world(each.values[0])])
def test_commands_run_on_a_tiny_model(
    words: list[str], diffrate_cli: Callable[..., Ran], tiny_world: Path
) -> None:
    ran = diffrate_cli(*in_the_tiny_world(words))
    assert ran.code == 0, ran.err
    assert ran.out


def test_make_targets_exist() -> None:
    named = {words[1] for block in BLOCKS for words in shell_lines(block) if words[0] == "make"}
    assert {"demo", "test", "lint"} <= named <= set(MAKE)


PYTHON = [
    block for block in BLOCKS if block.language == "python" and block.page != "README.md"
]  # test_cli has that


@pytest.mark.parametrize("block", [pytest.param(b, id=f"{b.page} {i}") for i, b in enumerate(PYTHON)])
def test_python(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, without the download of weights; where a page says that it cannot, its names at least exist."""
    for node in ast.walk(ast.parse(block.text)):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "diffrate"
        ):
            assert hasattr(diffrate, node.attr), node.attr
    if block.mark.startswith("not run: "):
        return
    monkeypatch.chdir(tmp_path)
    exec(block.text.replace("pretrained=True", "pretrained=False"), {})


def test_pages_link_to_what_exists() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http") and target != "cli.md":  # made when the site is built
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="the extra `docs` is not installed")
def test_the_site_builds(tmp_path: Path) -> None:
    """Strictly, and with nothing that a browser would have to fetch from elsewhere."""
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    built = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(built, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "cli.html").read_text()
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f"diffrate {name}" in reference
    assert "--tolerance" in reference
    assert "weights shared with" in (tmp_path / "api.html").read_text()  # a docstring
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"?https?:", text), page.name
        assert "fonts.googleapis" not in text
