"""A small helping of `make load`: memory is read, nothing is lost, and a server answers several at once."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attack import load
from diffrate.searching.images import MOST_HELD_OUT, SearchImages

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")


class Numbers(torch.utils.data.Dataset):
    """As many images as one likes, of which none is kept."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1, 2, 2), float(index))


@pytest.mark.parametrize(("count", "held"), [(100, 20), (9_000, 1_800), (200_000, MOST_HELD_OUT)])
def test_what_a_search_holds_out_does_not_grow_without_end(count: int, held: int) -> None:
    images = SearchImages(Numbers(count), Numbers(count), 0.2, seed=0)
    assert len(images.held_out) == held
    assert sorted(images.held_out + images.training) == list(range(count))


def test_memory_that_grows_is_seen() -> None:
    program = (
        "import time\nkept = []\nfor _ in range(20):\n    kept.append(bytearray(10 << 20)); time.sleep(0.05)"
    )
    ran = load.watched([sys.executable, "-c", program], every=0.02)
    assert ran["exit_code"] == 0
    assert 50 < load.flatness(ran["memory"])["growth_mib"] < 200
    assert 190 < load.flatness(ran["memory"])["peak_mib"] < 260
    quiet = load.watched([sys.executable, "-c", "import time; time.sleep(0.5)"], every=0.02)
    assert abs(load.flatness(quiet["memory"])["growth_mib"]) < 2


def test_children_count() -> None:
    program = "import time; kept = bytearray(50 << 20); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {program!r}])"
    process = subprocess.Popen([sys.executable, "-c", outer])
    try:
        seen = 0
        while seen < 50 << 20 and process.poll() is None:
            seen = max(seen, load.resident(process.pid))
        assert seen >= 50 << 20
    finally:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:
            subprocess.run(["kill", child], check=True)
        process.wait(30)


@pytest.mark.slow
def test_more_images_than_files_may_be_open(tmp_path: Path) -> None:
    """What comes from worker processes is copied before it is kept: 120 open files are enough for 200 images."""
    load.make_images(tmp_path, 200)
    assert load.search(tmp_path, 200, steps=3, descriptors=120)["images"] == 200
    assert load.evaluate(tmp_path, 200, batch_size=1, descriptors=120)["images"] == 200


@pytest.mark.slow
def test_forward_passes_leave_nothing_behind() -> None:
    after = load.forward_passes(300)["after"]
    assert list(after) == ["30", "150", "300"]
    assert after["300"]["tensors"] == after["30"]["tensors"]
    assert after["300"]["mib"] - after["30"]["mib"] < 20


@pytest.mark.slow
def test_the_server_answers_clients_at_once(tmp_path: Path) -> None:
    for name in ("fastapi", "uvicorn", "python_multipart"):
        if importlib.util.find_spec(name) is None:
            pytest.skip("the extra `serve` is not installed")
    found = load.serve(tmp_path, seconds=2, clients=4)
    assert found["errors"] == 0, found["first_errors"]
    assert found["server_said"] == ""
    assert found["answers"] > 8
