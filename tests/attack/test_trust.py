"""Nothing that is read from disk can run code: what the source never does, and what becomes of files that try."""

from __future__ import annotations

import ast
import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import diffrate
from attack.files import Targets
from conftest import TINY_FLAGS, check_refused
from diffrate.costs.table import LatencyTable
from diffrate.errors import DiffRateError

ROOT = Path(__file__).parents[2]
SOURCES = sorted(file for folder in ("src/diffrate", "examples") for file in (ROOT / folder).rglob("*.py"))
RUNS_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "runpy", "code"}


def dangers(source: str) -> list[str]:
    """Calls and imports by which a file's content could become code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in RUNS_CODE]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module or ""] if (node.module or "").split(".")[0] in RUNS_CODE else []
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load"):
                found.append(name)
            if (
                name in ("torch.load", "load_checkpoint", "load_state_dict_from_url")
                and given.get("weights_only") != "True"
            ):
                found.append(f"{name} without weights_only")
            if name.endswith(("np.load", "numpy.load")) and given.get("allow_pickle") != "False":
                found.append(f"{name} without allow_pickle=False")
            if given.get("shell") == "True" or given.get("trust_remote_code") not in (None, "False"):
                found.append(name)
    return found


def test_no_source_turns_data_into_code() -> None:
    assert len(SOURCES) > 100
    assert {str(file): dangers(file.read_text()) for file in SOURCES if dangers(file.read_text())} == {}


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from dill import load", "eval(x)", "torch.load(x)", "torch.load(x, weights_only=False)",
     "yaml.load(x)", "np.load(x)", "subprocess.run(x, shell=True)",
     "AutoModel.from_pretrained(x, trust_remote_code=True)"],
)  # fmt: skip
def test_the_walk_sees_what_it_looks_for(line: str) -> None:
    assert dangers(line)


class Hostile:
    """Pickled, it is a command that whoever unpickles it runs."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def hostile_files(mark: Path) -> dict[str, bytes]:
    """The same pickle plain, as torch writes it now and wrote it once, and inside a numpy archive."""
    new, old, arrays = io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save({"model": Hostile(mark)}, new)
    torch.save({"model": Hostile(mark)}, old, _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(arrays, "w") as archive, archive.open("x.npy", "w") as file:
        np.lib.format.write_array(file, np.array([Hostile(mark)], dtype=object), allow_pickle=True)
    return {
        "plain": pickle.dumps(Hostile(mark)),
        "new": new.getvalue(),
        "old": old.getvalue(),
        "numpy": arrays.getvalue(),
    }


def test_the_files_are_hostile(tmp_path: Path) -> None:
    """Where they are trusted, they run: otherwise the tests below would show nothing."""
    for kind, content in hostile_files(tmp_path / "ran").items():
        (tmp_path / kind).write_bytes(content)
        if kind == "numpy":
            np.load(tmp_path / kind, allow_pickle=True)["x"]
        else:
            with io.BytesIO(content) as file:
                pickle.load(file) if kind == "plain" else torch.load(file, weights_only=False)
        (tmp_path / "ran").rmdir()


@pytest.mark.parametrize("kind", ["plain", "new", "old", "numpy"])
@pytest.mark.parametrize("ending", ["pth", "safetensors", "npz", "bin"])
def test_a_hostile_checkpoint_is_refused(
    diffrate_cli, image_folder, tmp_path: Path, kind: str, ending: str
) -> None:
    checkpoint = tmp_path / f"weights.{ending}"
    checkpoint.write_bytes(hostile_files(tmp_path / "ran")[kind])
    ran = diffrate_cli(
        "eval",
        *TINY_FLAGS,
        "--checkpoint",
        checkpoint,
        "--data-dir",
        image_folder,
        "--split",
        "val",
        "--workers",
        0,
    )
    check_refused(ran, "checkpoint .* does not load into")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["plain", "new", "numpy"])
def test_hostile_files_of_every_other_kind_are_refused(tmp_path: Path, kind: str) -> None:
    content, targets = hostile_files(tmp_path / "ran")[kind], Targets(tmp_path / "attack")
    for where, use in targets.uses.values():
        folder = tmp_path / "work"
        shutil.copytree(targets.good / where.split("/")[0], folder)
        (folder / where.split("/")[1]).write_bytes(content)
        with pytest.raises(DiffRateError):
            use(folder)
        shutil.rmtree(folder)
    for read in (diffrate.load, LatencyTable.load, diffrate.Schedule.load):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(DiffRateError):
            read(tmp_path / "file")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["plain", "new", "numpy"])
@pytest.mark.parametrize("ending", ["pkl", "txt"])
def test_a_hostile_class_map_is_refused(
    diffrate_cli, image_folder, tmp_path: Path, kind: str, ending: str
) -> None:
    """timm itself unpickles class maps, and before 1.0.28 ran what is in them."""
    class_map = tmp_path / f"map.{ending}"
    class_map.write_bytes(hostile_files(tmp_path / "ran")[kind])
    data = ["--data-dir", image_folder, "--split", "val", "--workers", 0]
    ran = diffrate_cli("eval", *TINY_FLAGS, *data, "--class-map", class_map)
    check_refused(ran, "class map .* cannot be read: it is a text file")
    assert not (tmp_path / "ran").exists()


def test_an_archive_with_a_hostile_cache_is_refused(diffrate_cli, tmp_path: Path) -> None:
    """timm keeps a pickled list of what a large archive holds beside it, and before 1.0.28 ran what is in it."""
    with open(tmp_path / "images.tar", "wb") as archive:
        archive.truncate(11 << 30)  # as large as those with a list; it takes no room
    (tmp_path / "_images_tarinfos.pickle").write_bytes(hostile_files(tmp_path / "ran")["plain"])
    ran = diffrate_cli("eval", *TINY_FLAGS, "--data-dir", tmp_path / "images.tar", "--workers", 0)
    check_refused(ran, "images.tar is no folder")
    assert not (tmp_path / "ran").exists()
