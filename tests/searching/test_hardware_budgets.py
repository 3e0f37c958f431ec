"""Searches within milliseconds and milliwatts, and designs that are searched along."""

import json
import math
import re
from dataclasses import replace

import pytest
import timm
import torch
from PIL import Image

import diffrate
from conftest import TINY_FLAGS, check_refused, random_vit, write_image
from diffrate.backbones import backbone_of
from diffrate.costs import Costs, Design, GemminiCost, LatencyTable, MacCost, TableCost, Workload
from diffrate.costs.gemmini import buildable_designs
from diffrate.costs.table import BlockTimes, Fit, Series
from diffrate.searching import cosearch as cosearching
from diffrate.searching.budget import Budget, Space, check_budget, rounded
from diffrate.searching.hardware import HardwareSearch
from diffrate.searching.places import first_counts, places
from diffrate.searching.starts import starts


@pytest.fixture
def model():
    return random_vit(depth=6)


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(3, 32, 32, generator=generator), i % 7) for i in range(40)]


def run(model, data, budget, **changes):
    settings = {"steps": 8, "batch_size": 8, "patience": 100, "progress": False}
    return diffrate.search(model, data, budget, **settings | changes)


def table(removal, **changes):
    """6 blocks of 65 tokens: 1 ms for 65 tokens in attention, 2 in the MLP, and `removal` ms for removing any."""

    def straight(ms, start=0.0):
        return Series([1, 65], [start + ms / 65, start + ms], [0.0, 0.0])

    times = BlockTimes(straight(1.0), straight(2.0), straight(0.0, removal), whole=1.0)
    last = straight(1.0, 2 / 65 + removal)  # its attention, the class token in its MLP, and a removal
    values = {
        "model": None, "depth": 6, "dim": 32, "tokens": 65, "prefix": 1, "device": "x", "dtype": "float32",
        "batch_size": 8, "mode": "eager", "torch": "2.8", "operator": {}, "kinds": [times], "kind_of": [0] * 6,
        "last": last, "around": 0.0, "fit": Fit(), "checks": [],
    }  # fmt: skip
    return LatencyTable(**values | changes)


def removing(schedule):
    before = [schedule.tokens, *schedule.merge[:-1]]
    return [i for i, (a, b) in enumerate(zip(before, schedule.merge, strict=True)) if b < a]


@pytest.mark.parametrize("recipe", ["fast", "paper"])
def test_a_search_meets_milliseconds(model, data, recipe):
    found = run(model, data, "13ms,11ms", recipe=recipe, costs=[TableCost(table(0.05))])
    for schedule, target in zip(found.schedules, (13, 11), strict=True):
        kept = [65, *schedule.merge]
        taken = sum(kept[:6]) / 65 + 2 * sum(kept[1:]) / 65 + 0.05 * len(removing(schedule))  # by hand
        assert 0.95 * target < taken <= target
        assert schedule.cost["latency_ms"] == pytest.approx(taken)
        assert schedule.cost["gmacs"] == pytest.approx(diffrate.gmacs(model, schedule))
        assert schedule.made["budget_latency_ms"] == target


def test_removals_that_cost_much_become_few(model, data):
    """At 1.2 ms a removal, one in every block would leave little: with few places more tokens are kept."""
    costs, budget = [TableCost(table(1.2))], Budget({"latency_ms": 14.0})
    found = run(model, data, "14ms", costs=costs).schedule
    assert len(removing(found)) <= 2
    assert 13 < found.cost["latency_ms"] <= 14
    backbone = backbone_of(model)
    space = Space.of(backbone, Costs([MacCost.of_backbone(backbone), *costs]))
    steadily = rounded(starts(space, budget)[0], budget, space)
    everywhere = diffrate.Schedule(*2 * (space.every_block(steadily),), prefix=1)
    assert len(removing(everywhere)) == 5
    assert found.cost["gmacs"] > diffrate.gmacs(model, everywhere)


def test_places_can_meet_the_budget_and_tie_what_lies_between(model):
    backbone = backbone_of(model)
    space = Space.of(backbone, Costs([MacCost.of_backbone(backbone), TableCost(table(1.2))]))
    budget = Budget({"latency_ms": 12.0})
    candidates = places(space, budget)
    assert {len(c.ties) for c in candidates} >= {3, 4}  # one or two removals before the last block
    for each in candidates:
        assert [block for part in each.ties for block in part] == list(range(6))
        counts = first_counts(each, budget)
        kept = rounded(counts, budget, each)
        assert all(len({kept[block] for block in part}) == 1 for part in each.ties)
        assert 11 < float(each.price(torch.tensor(kept).double())["latency_ms"]) <= 12
    # Dropping all but the class token in the last block would save 2 ms for 1.2: done; at 2.5 ms a removal, not.
    assert all(c.ties[-1] == (5,) for c in candidates)
    dear = replace(space, cost=Costs([MacCost.of_backbone(backbone), TableCost(table(2.5))]))
    assert all(5 in c.ties[-1] and len(c.ties[-1]) > 1 for c in places(dear, Budget({"latency_ms": 14.0})))


def test_places_whose_removals_alone_take_the_budget_are_left_out(model, data):
    """8 ms hold the fewest tokens after one removal, or one after each of two, but with two nothing in between."""
    costs, budget = [TableCost(table(1.2))], Budget({"latency_ms": 8.0})
    backbone = backbone_of(model)
    space = Space.of(backbone, Costs([MacCost.of_backbone(backbone), *costs]))
    assert [len(c.ties) for c in places(space, budget)] == [3]
    found = run(model, data, "8ms", costs=costs).schedule
    assert 0.95 * 8 < found.cost["latency_ms"] <= 8


def test_times_in_stairs_do_not_lead_to_the_least_schedule(model, data):
    """Kernels work in tiles: where time is flat, one more token takes nothing, and no step leads back onto a budget."""
    counts = list(range(1, 66))

    def stairs(ms):
        return Series(counts, [ms * math.ceil(n / 16) / 5 for n in counts], [0.0] * 65)

    times = BlockTimes(stairs(1.0), stairs(2.0), Series([1, 65], [0.05, 0.05], [0.0, 0.0]), whole=1.0)
    costs = [TableCost(table(0.05, kinds=[times]))]
    found = run(model, data, "12ms", costs=costs).schedule
    # The step down from there, by hand: the longest tied part saves at most a tile of five blocks, 0.6 ms each.
    assert 9 < found.cost["latency_ms"] <= 12
    assert max(found.merge[1:]) > 16


def test_the_least_is_the_whole_model_where_removing_takes_longer(model):
    """Six blocks of 1 + 2 ms, and 20 ms for a removal."""
    backbone = backbone_of(model)
    space = Space.of(backbone, Costs([MacCost.of_backbone(backbone), TableCost(table(20.0))]))
    with pytest.raises(diffrate.DiffRateError, match=r"1 ms cannot be met: .* 18 whole and 18 at the least"):
        check_budget(Budget({"latency_ms": 1.0}), space)
    with pytest.raises(diffrate.DiffRateError, match="19ms asks for nothing: the whole model costs 18ms"):
        check_budget(Budget({"latency_ms": 19.0}), space)


def test_a_mix_of_targets_on_gemmini(model, data):
    cost = GemminiCost(Workload.of(model))
    whole = cost.price_of(None)
    budget = f"70%,{0.8 * whole['latency_ms']:.6f}ms,{0.9 * whole['power_at_rate_mw']:.6f}mW"
    schedule = run(model, data, budget, costs=[cost]).schedule
    assert diffrate.gmacs(model, schedule) <= 0.7 * diffrate.gmacs(model)
    assert schedule.cost["latency_ms"] <= 0.8 * whole["latency_ms"]
    assert schedule.cost["power_at_rate_mw"] <= 0.9 * whole["power_at_rate_mw"]


def test_a_resumed_latency_search_ends_where_it_would_have(model, data, tmp_path, monkeypatch):
    from diffrate.searching import fast, report

    costs = [TableCost(table(0.3))]
    undisturbed = run(model, data, "13ms", costs=costs)
    step, calls = fast.FastRecipe.step, []

    def killed(self, *arguments):
        calls.append(1)
        if len(calls) > 4:
            raise KeyboardInterrupt
        return step(self, *arguments)

    monkeypatch.setattr(report, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(fast.FastRecipe, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        run(model, data, "13ms", costs=costs, output=tmp_path)
    monkeypatch.setattr(fast.FastRecipe, "step", step)
    with pytest.raises(diffrate.DiffRateError, match="another"):
        run(model, data, "13ms", costs=[TableCost(table(0.2))], output=tmp_path, resume=True)
    resumed = run(model, data, "13ms", costs=costs, output=tmp_path, resume=True)
    assert resumed.schedule.merge == undisturbed.schedule.merge
    assert resumed.history == undisturbed.history


def folder_of_images(root):
    for i in range(24):
        write_image(root / f"{i:02d}.png", seed=i)
    return root


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--budget", "2ms"], "needs --profile-table or --hardware"),
        (["--budget", "2mW", "--profile-table", "table.json"], "another model"),
        (["--budget", "2ms", "--profile-table", "absent.json"], "cannot read the latency table"),
        (["--budget", "2ms", "--any-table"], "go with a --profile-table"),
        (["--budget", "0.0001ms", "--hardware", "gemmini"], "ms cannot be met.* at the least"),
        (["--budget", "2ms", "--hardware", "tpu"], "cannot read the design tpu"),
    ],
)
def test_mistakes_with_hardware_budgets(tmp_path, monkeypatch, diffrate_cli, flags, sentence):
    monkeypatch.chdir(tmp_path)
    folder_of_images(tmp_path / "images")
    table(0.1, model="deit_tiny_patch16_224").save(tmp_path / "table.json")
    done = diffrate_cli(
        "search", *TINY_FLAGS, "--data-dir", "images", "--output", "run", "--device", "cpu", *flags
    )
    check_refused(done, sentence)
    assert not (tmp_path / "run").exists()


def test_search_command_with_a_table_and_with_gemmini(tmp_path, diffrate_cli):
    images = folder_of_images(tmp_path / "images")
    small = table(0.1, depth=4, tokens=17, kind_of=[0] * 4)
    small.save(tmp_path / "table.json")
    flags = ["--data-dir", images, "--steps", 3, "--batch-size", 8, "--workers", 0, "--device", "cpu"]
    measured = ["--budget", "4.5ms", "--profile-table", tmp_path / "table.json"]
    done = diffrate_cli("search", *TINY_FLAGS, *flags, *measured, "--output", tmp_path / "a")
    check_refused(done, "another device")
    done = diffrate_cli("search", *TINY_FLAGS, *flags, *measured, "--any-table", "--output", tmp_path / "a")
    assert done.code == 0, done.err
    assert "another device" in done.err
    found = diffrate.Schedule.load(tmp_path / "a" / "schedule.json")
    assert 4 < found.cost["latency_ms"] <= 4.5
    done = diffrate_cli(
        "search",
        *TINY_FLAGS,
        *flags,
        "--budget",
        "95%,0.2ms,40mW",
        "--hardware",
        "gemmini",
        "--output",
        tmp_path / "b",
    )
    assert done.code == 0, done.err
    found = diffrate.Schedule.load(tmp_path / "b" / "schedule.json")
    assert found.cost["latency_ms"] <= 0.2
    assert found.cost["power_at_rate_mw"] <= 40


# --- designs ----------------------------------------------------------------------------------------------------------


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
