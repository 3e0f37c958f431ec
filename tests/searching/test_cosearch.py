"""Co-searches: designs that can be built, priced by what they cost, and learned along with a schedule."""

import json
import re

import pytest
import timm
import torch
from PIL import Image

import diffrate
from conftest import TINY_FLAGS, check_refused, random_vit
from diffrate import embedded
from diffrate.costs import Design, GemminiCost, Workload
from diffrate.costs.gemmini import buildable_designs
from diffrate.errors import DiffRateError
from diffrate.searching import cosearch as cosearching
from diffrate.searching.budget import Budget
from diffrate.searching.hardware import HardwareSearch


@pytest.fixture
def model():
    return random_vit(depth=6)


@pytest.fixture(scope="module")
def workload():
    return Workload.of(random_vit(depth=4))


KEPT = [65.0, 50.0, 40.0, 1.0]


@pytest.mark.slow
def test_priced_options_lead_to_the_target():
    """DeiT-S: what is drawn in the end lies within a third of the target, what is chosen below it."""
    workload = Workload.of(timm.create_model("deit_small_patch16_224"))
    kept = [float(n) for n in diffrate.Schedule.published("deit_small_patch16_224", 2.9).effective.merge]
    for target in (20.0, 30.0):
        found = HardwareSearch(workload, Budget({"latency_ms": target}))
        drawn = [found.step(kept, 2.0 * 0.15 ** (i / 79))[0] for i in range(80)]
        late = workload.price(torch.stack(drawn[-10:]), kept)["latency_ms"]
        assert 0.67 * target < float(late.mean()) < 1.33 * target
        chosen = float(workload.price(found.sweep(kept).row()[None], kept)["latency_ms"])
        assert 0.67 * target < chosen <= target


@pytest.mark.parametrize("estimator", ["priced", "paper"])
def test_only_designs_that_can_be_built_are_drawn(workload, estimator):
    known = {tuple(row) for row in buildable_designs().tolist()}
    search = HardwareSearch(
        workload, Budget({"latency_ms": 1.0, "power_at_rate_mw": 50.0}), estimator, seed=3
    )
    for entry in search.run(KEPT, 15):
        assert tuple(map(float, entry["design"])) in known
    assert search.design.is_buildable


def test_no_array_is_larger_than_allowed(workload):
    """4x4 at most: nothing else is drawn, nor found in the sweep, though the target asks for a larger array."""
    budget = Budget({"latency_ms": 0.4, "power_at_rate_mw": 60.0})
    free, bound = HardwareSearch(workload, budget), HardwareSearch(workload, budget, largest_array=4)
    free.run(KEPT, 10)
    assert free.design.rows > 4
    for entry in bound.run(KEPT, 10):
        assert entry["design"][:4] == [1, 1, 4, 4]
    assert bound.design.rows == 4
    assert bound.design.is_buildable
    assert HardwareSearch(workload, budget, largest_array=8).sweep(KEPT).rows <= 8  # starts at another design
    with pytest.raises(diffrate.DiffRateError, match="the smallest is 4x4"):
        HardwareSearch(workload, budget, largest_array=3)
    fastest = float(workload.price(buildable_designs(), [65.0, 2.0, 2.0, 1.0])["latency_ms"].min())
    tight = HardwareSearch(workload, Budget({"latency_ms": 1.2 * fastest}), largest_array=4)
    with pytest.raises(diffrate.DiffRateError, match="any design with an array of at most 4x4: the least"):
        tight.check([65.0, 2.0, 2.0, 1.0])


def test_the_sweep_never_makes_a_design_worse(workload):
    search = HardwareSearch(workload, Budget({"latency_ms": 0.4, "power_at_rate_mw": 60.0}))
    search.step(KEPT, 1.0)
    before = search.best_score
    swept = search.sweep(KEPT)
    after = float(search.score(workload.price(swept.row()[None], KEPT))[0])
    assert after == pytest.approx(search.best_score)
    assert after <= before


def test_estimates_are_means_over_the_parameters(workload):
    """With certain choices both estimators give the price of the design itself, not eight times that."""
    for estimator in ("priced", "paper"):
        search = HardwareSearch(workload, Budget({"latency_ms": 1e-9}), estimator, {"latency_ms": 1.0})
        row = Design().row()
        for h, logits in enumerate(search.logits):
            logits.data[int((search.values[h] == row[h]).nonzero())] = 1e4
        design, loss = search.step(KEPT, 0.1)
        assert torch.equal(design, row)
        price = float(workload.price(row[None], KEPT)["latency_ms"])
        assert loss * 1e-9 == pytest.approx(price, rel=1e-6)  # log cosh is straight so far from its target


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        ({"latency_ms": 1e-6}, "cannot be met on any design: the least possible is"),
        ({"power_at_rate_mw": 1e-6}, "the least possible is .* mW"),
        ({"gmacs": 1.0}, "needs a target for latency, power or energy"),
    ],
)
def test_impossible_targets_name_the_nearest_possible(workload, targets, sentence):
    with pytest.raises(diffrate.DiffRateError, match=sentence):
        HardwareSearch(workload, Budget(targets)).check([65.0, 2.0, 2.0, 1.0])
    if "latency_ms" in targets:
        least = float(workload.price(buildable_designs(), [65.0, 2.0, 2.0, 1.0])["latency_ms"].min())
        together = Budget({"latency_ms": least * 1.001, "power_at_rate_mw": 1.0})
        with pytest.raises(diffrate.DiffRateError):
            HardwareSearch(workload, together).check([65.0, 2.0, 2.0, 1.0])


def test_cosearch_learns_rates_and_design(model, data, tmp_path):
    workload = Workload.of(model)
    default = workload.price(Design().row()[None], [65.0] * 6)
    target = 0.8 * float(default["latency_ms"])
    found = diffrate.cosearch(
        model, data, f"70%,{target:.6f}ms", rounds=2, hardware_steps=5, output=tmp_path / "co",
        steps=4, batch_size=8, progress=False,
    )  # fmt: skip
    assert found.design.is_buildable
    assert found.cost["latency_ms"] <= target
    assert diffrate.gmacs(model, found.schedule) <= 0.7 * diffrate.gmacs(model)
    assert Design.load(tmp_path / "co" / "design.json") == found.design
    again = GemminiCost(workload, found.design).price_of(
        diffrate.Schedule.load(tmp_path / "co" / "schedule.json")
    )
    assert again["latency_ms"] == pytest.approx(found.cost["latency_ms"])
    # One period for all designs: that of the whole model on the default one.
    milliwatts = found.cost["energy_mj"] / float(default["latency_ms"]) * 1e3
    assert found.cost["power_at_rate_mw"] == pytest.approx(milliwatts)
    with Image.open(tmp_path / "co" / "designs.png") as picture:
        assert picture.width > 300
    with pytest.raises(diffrate.DiffRateError, match="already holds"):
        diffrate.cosearch(model, data, "70%,5ms", output=tmp_path / "co")


@pytest.mark.slow
def test_a_broken_off_cosearch_goes_on_to_the_same_result(data, tmp_path, monkeypatch):
    model, budget = random_vit(), "60%,0.5ms"
    options = {"rounds": 2, "hardware_steps": 2, "largest_array": 8}  # which leaves few designs, and is quick
    options |= {"steps": 2, "batch_size": 8, "progress": False}
    whole = diffrate.cosearch(model, data, budget, output=tmp_path / "whole", **options)
    searched = cosearching.search
    with monkeypatch.context() as patched:

        def break_off(*arguments, **given):
            if given["output"].name == "round-2":
                raise KeyboardInterrupt
            return searched(*arguments, **given)

        patched.setattr(cosearching, "search", break_off)
        with pytest.raises(KeyboardInterrupt):
            diffrate.cosearch(model, data, budget, output=tmp_path / "co", **options)
    assert (tmp_path / "co" / "round-1" / "schedule.json").exists()
    with pytest.raises(diffrate.DiffRateError, match="already holds a co-search: resume it"):
        diffrate.cosearch(model, data, budget, output=tmp_path / "co", **options)
    with pytest.raises(diffrate.DiffRateError, match="was started with another"):
        diffrate.cosearch(
            model, data, budget, output=tmp_path / "co", resume=True, **(options | {"steps": 3})
        )
    with pytest.raises(diffrate.DiffRateError, match="holds no co-search to resume"):
        diffrate.cosearch(model, data, budget, output=tmp_path / "nothing", resume=True, **options)
    resumed = diffrate.cosearch(model, data, budget, output=tmp_path / "co", resume=True, **options)
    assert (resumed.schedule, resumed.design, resumed.rounds) == (whole.schedule, whole.design, whole.rounds)


def test_cosearch_without_images_keeps_what_is_merged(model):
    given = diffrate.Schedule((65, 60, 50, 40, 30, 20), (65, 55, 50, 35, 30, 15))
    found = diffrate.cosearch(model, None, "50%,2ms", schedule=given, rounds=1, hardware_steps=2).schedule
    assert diffrate.gmacs(model, found) <= 0.5 * diffrate.gmacs(model)
    assert found.operator == given.operator
    assert [p - m for p, m in zip(found.prune, found.merge, strict=True)][1:5] == [5, 0, 5, 0]


def test_cosearch_leaves_the_model_alone_where_hardware_is_enough(model, data):
    said = []
    found = diffrate.cosearch(model, data, "1000ms", rounds=1, hardware_steps=2, say=said.append)
    assert found.schedule.removes_nothing
    assert any("hardware alone meets the budget" in line for line in said)


@pytest.mark.slow
def test_cosearch_command_on_the_papers_table(tmp_path, diffrate_cli):
    """DeiT-S without weights: the paper's order, and at equal MACs 5 % less time and power than MACs alone."""
    flags = [
        "--schedule",
        "published:2.9",
        "--budget",
        "2.9G,37.6ms,79.3mW",
        "--hardware-steps",
        40,
        "--rounds",
        2,
    ]
    done = diffrate_cli(
        "cosearch",
        "--model",
        "deit_small_patch16_224",
        *flags,
        "--output",
        tmp_path / "co",
        "--json",
        tmp_path / "out",
    )
    assert done.code == 0, done.err
    rows = json.loads((tmp_path / "out").read_text())["results"]["rows"]
    whole, evit, given, _, joint = rows.values()
    for metric in ("latency_ms", "power_at_rate_mw"):
        assert whole[metric] > evit[metric] > given[metric] > joint[metric]
        assert joint[metric] < 0.95 * given[metric]
    assert joint["gmacs"] == pytest.approx(given["gmacs"], rel=0.01)
    paper = {"latency_ms": (40.4 / 68.1, 40.1 / 68.1), "power_at_rate_mw": (99 / 156, 98 / 156)}
    for metric, (evit_ratio, given_ratio) in paper.items():
        assert abs(evit[metric] / whole[metric] - evit_ratio) < 0.1
        assert abs(given[metric] / whole[metric] - given_ratio) < 0.1
    assert abs(joint["power_at_rate_mw"] / whole["power_at_rate_mw"] - 90 / 156) < 0.1
    assert re.search(r"32x32 array", done.out)
    # On the array that the whole model has, the rates must give way, and both ratios are the paper's.
    start = diffrate.Schedule.published("deit_small_patch16_224", 2.9)
    model = timm.create_model("deit_small_patch16_224")
    small = diffrate.cosearch(
        model, None, "2.9G,37.6ms,79.3mW", schedule=start, rounds=1, hardware_steps=10, largest_array=16
    )
    assert small.design.rows == 16
    assert 37.6 / 68.1 - 0.1 < small.cost["latency_ms"] / whole["latency_ms"] <= 37.6 / 68.1
    assert 90 / 156 - 0.1 < small.cost["power_at_rate_mw"] / whole["power_at_rate_mw"] <= 90 / 156 + 1e-3


def test_cosearch_mistakes(tmp_path, diffrate_cli):
    flags = ["cosearch", *TINY_FLAGS, "--output", tmp_path / "co"]
    check_refused(diffrate_cli(*flags, "--budget", "0.01ms"), "give images")
    diffrate.Schedule((17, 9, 9, 9), (17, 9, 9, 9)).save(tmp_path / "s.json")
    flags += ["--schedule", tmp_path / "s.json"]
    check_refused(
        diffrate_cli(*flags, "--budget", "0.00001ms"), "cannot be met on any design: the least possible is"
    )
    check_refused(diffrate_cli(*flags, "--budget", "80%"), "needs a target for latency")
    check_refused(diffrate_cli(*flags, "--budget", "2ms,3ms"), "takes one budget")
    check_refused(diffrate_cli(*flags, "--budget", "2ms", "--estimator", "magic"), "priced, paper")
    check_refused(diffrate_cli(*flags, "--budget", "2ms", "--largest-array", 2), "the smallest is 4x4")
    assert not (tmp_path / "co").exists()


def test_cosearch_of_the_embedded_model_learns_on_its_images(tmp_path, diffrate_cli, monkeypatch):
    asked = []

    def stopped(model, data, budget, **options):
        asked.append((data, options))
        raise DiffRateError("far enough")

    monkeypatch.setattr("diffrate.cli.cosearch.cosearch", stopped)
    flags = ["cosearch", "--model", "embedded", "--budget", "3ms", "--output", tmp_path / "co"]
    check_refused(diffrate_cli(*flags), "far enough")
    diffrate.Schedule((197, *[99] * 11), (197, *[99] * 11)).save(tmp_path / "s.json")
    check_refused(diffrate_cli(*flags, "--schedule", tmp_path / "s.json"), "far enough")
    (learned, options), (moved, _) = asked
    assert [len(each) for each in learned] == [embedded.SPLITS["search"]] * 2  # augmented, and as they are
    assert options["origin"]["dataset"] == embedded.NAME
    assert moved is None  # counts that are given are moved where no images are
