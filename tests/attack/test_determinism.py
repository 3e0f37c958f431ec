"""A seed decides: a search, a tuning and a forward pass end in the same bits in every process that starts anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import hashlib, json, sys
from pathlib import Path

import torch

import diffrate
from attack import kill
from conftest import random_vit

def digest(found):
    if isinstance(found, torch.Tensor):
        return hashlib.sha256(found.contiguous().numpy().tobytes()).hexdigest()
    if isinstance(found, dict):
        return {name: digest(value) for name, value in found.items()}
    return json.dumps(found)

folder, ended = Path(sys.argv[1]), {}
for name, job in kill.JOBS.items():
    job(folder / name, False)
    found = kill.result(folder / name)
    ended[name] = digest(found if isinstance(found, dict) else {"schedules": found[0], "steps": found[1]})
torch.manual_seed(0)
schedule = diffrate.Schedule((65, 50, 40, 30), (65, 45, 35, 20))
fast = diffrate.compress(random_vit(), schedule, importance="random", seed=7)
with torch.inference_mode():
    ended["logits"] = digest(fast(torch.randn(4, 3, 32, 32)))
print(json.dumps(ended, sort_keys=True))
"""


@pytest.mark.slow
def test_processes_of_their_own_end_in_the_same_bits(tmp_path: Path) -> None:
    ends = []
    for run, hash_seed in enumerate(
        ("1", "20261")
    ):  # sets and dicts of strings are ordered otherwise in each
        folder = tmp_path / str(run)
        folder.mkdir()
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, folder], capture_output=True, text=True, timeout=300, cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        ends.append(done.stdout.strip().splitlines()[-1])
    assert '"search"' in ends[0]
    assert '"finetune"' in ends[0]
    assert ends[0] == ends[1]
