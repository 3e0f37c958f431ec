"""Searches within milliseconds and milliwatts: on measured tables, on Gemmini, and from the command line."""

import math
from dataclasses import replace

import pytest
import torch

import diffrate
from conftest import TINY_FLAGS, check_refused, random_vit, write_image
from diffrate.backbones import backbone_of
from diffrate.costs import Costs, GemminiCost, LatencyTable, MacCost, TableCost, Workload
from diffrate.costs.table import BlockTimes, Fit, Series
from diffrate.devices import device_name
from diffrate.searching.budget import Budget, Space, check_budget, rounded
from diffrate.searching.places import first_counts, places
from diffrate.searching.starts import starts


@pytest.fixture
def model():
    return random_vit(depth=6)


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
    here = device_name(torch.device("cpu"))
    table(0.1, depth=4, tokens=17, kind_of=[0] * 4, device=here).save(tmp_path / "here.json")
    for more in (["--operation", "prune"], []):
        on = ["--budget", "4.5ms", "--profile-table", tmp_path / "here.json", *more]
        done = diffrate_cli("search", *TINY_FLAGS, *flags, *on, "--output", tmp_path / "a")
        check_refused(done, "another operator: the paper's, not operation")
    on = ["--budget", "4.5ms", "--profile-table", tmp_path / "here.json", "--operator", "paper"]
    done = diffrate_cli("search", *TINY_FLAGS, *flags, *on, "--output", tmp_path / "papers")
    assert done.code == 0, done.err
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
