"""The Gemmini model against zigzag-dse, which searches the best mapping of each product itself.

The 72 points come from reproduce/zigzag_points.py; the quick ones are priced anew here. zigzag-dse knows nothing of
the overheads that were fitted on RTL, so they are left out.
"""

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

from diffrate.costs import Design
from diffrate.costs.gemmini.matmul import Array, Energies, Overheads, Shape, cycles, energy_pj, tiling

POINTS = json.loads((Path(__file__).parent / "zigzag_points.json").read_text())
SCRIPT = Path(__file__).parents[2] / "reproduce" / "zigzag_points.py"


def ours(point):
    shape = Shape(*(torch.tensor(float(n), dtype=torch.float64) for n in point["shape"]))
    array = Array.of(Design(**point["design"]).row())
    tiles = tiling(shape, array)
    taken = cycles(shape, array, tiles, Overheads(0.0, 0.0))
    return float(taken), float(energy_pj(shape, array, tiles, Energies(dram_byte=100.0)))


def kendall(a, b):
    pairs = [(x - y) * (u - v) for (x, u), (y, v) in itertools.combinations(zip(a, b, strict=True), 2)]
    return sum((p > 0) - (p < 0) for p in pairs) / len(pairs)


def test_latency_and_energy_agree_with_zigzag(capsys):
    assert len(POINTS) == 72
    figures = {}
    for i, (name, metric) in enumerate((("latency", "cycles"), ("energy", "pj"))):
        mine, theirs = [ours(point)[i] for point in POINTS], [point[metric] for point in POINTS]
        errors = [abs(m / t - 1) for m, t in zip(mine, theirs, strict=True)]
        base = [e for e, p in zip(errors, POINTS, strict=True) if Design(**p["design"]) == Design()]
        figures[name] = sum(errors) / len(errors), kendall(mine, theirs)
        with capsys.disabled():
            print(
                f"\nzigzag-dse: {name} {figures[name][0]:.1%} mean error, Kendall tau {figures[name][1]:.3f} "
                f"on {len(errors)} points (default design: {sum(base) / len(base):.1%})"
            )
    assert figures["latency"][0] < 0.20
    assert figures["latency"][1] > 0.90
    assert figures["energy"][0] < 0.30
    assert figures["energy"][1] > 0.80  # the fastest mapping is not always that of the least energy


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_points_are_what_zigzag_says_today():
    pytest.importorskip("zigzag", reason="zigzag-dse is not installed")
    if not SCRIPT.is_file():
        pytest.skip("reproduce/ is not part of a source distribution")
    spec = importlib.util.spec_from_file_location("zigzag_points", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    sys.modules["zigzag_points"] = script
    spec.loader.exec_module(script)
    quick = [point for point in POINTS if point["shape"] == [64, 64, 64]]
    assert len(quick) == 8
    for point in quick[::3]:  # three designs
        taken, pj = script.zigzag(tuple(point["shape"]), Design(**point["design"]), Energies(dram_byte=100.0))
        assert taken == pytest.approx(point["cycles"])
        assert pj == pytest.approx(point["pj"])
