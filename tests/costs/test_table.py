"""Latency tables: what they predict, what they refuse, and profiles of a small model."""

import json
from dataclasses import asdict, replace

import pytest
import torch

import diffrate
from conftest import TINY_FLAGS, check_refused, random_vit
from diffrate.backbones import backbone_of
from diffrate.costs.table import BlockTimes, Fit, LatencyTable, Series, TableCost
from diffrate.errors import DiffRateError
from diffrate.operator import Operator
from diffrate.profiling import check_schedules, grid, profile
from diffrate.searching import fast


def straight(slope, start=0.0, n=(1, 10, 65)):
    return Series(list(n), [start + slope * x for x in n], [0.0] * len(n))


def a_table(**changes):
    times = BlockTimes(straight(0.02), straight(0.04), straight(0.0, 0.3), whole=1.0)
    table = LatencyTable(
        "my_vit",
        5,
        96,
        65,
        1,
        "a machine",
        "float32",
        8,
        "eager",
        "2.8",
        {},
        [times],
        [0] * 5,
        straight(0.01, 0.1),
        0.5,
        Fit(2.0, 3.0, 0.25),
        [],
    )
    return replace(table, **changes)


def test_price_by_hand():
    """Attention on all tokens has its own time; what removes tokens pays for it; the last block is another thing."""
    attention = 1.0 + 1.0 + 0.02 * (40 + 40)
    mlp = 0.04 * (65 + 40 + 40 + 20)
    removals = 0.3 + 0.3
    before = 0.5 + attention + mlp
    for kept, last in ((1.0, 0.1 + 0.01 * 20), (15.0, 0.1 + 0.01 * 20), (20.0, 0.02 * 20 + 0.04 * 20)):
        price = TableCost(a_table()).price(torch.tensor([65.0, 40.0, 40.0, 20.0, kept]).double())
        assert float(price["latency_ms"]) == pytest.approx(2 * (before + last) + 3 * removals + 0.25)
    price = TableCost(a_table(last=None)).price(torch.tensor([65.0, 40.0, 40.0, 20.0, 5.0]).double())
    usual = 0.02 * 20 + 0.04 * 5  # where the head looks at every token
    assert float(price["latency_ms"]) == pytest.approx(2 * (before + usual) + 3 * (removals + 0.3) + 0.25)


def test_slopes_are_those_of_the_table():
    kept = torch.tensor([65.0, 40.0, 40.0, 20.0, 20.0], dtype=torch.float64, requires_grad=True)
    TableCost(a_table()).price(kept)["latency_ms"].backward()
    assert kept.grad[3].item() == pytest.approx(2 * (0.02 + 0.04))
    assert kept.grad[4].item() == pytest.approx(2 * 0.04)


def test_noise_is_smoothed_to_rising_times():
    noisy = Series([1, 3, 5, 7], [1.0, 4.0, 2.0, 6.0], [0.0] * 4)  # pooled: 1, 3, 3, 6
    assert noisy.every_count(8).tolist() == pytest.approx([1, 1, 2, 3, 3, 3, 4.5, 6, 6])


@pytest.fixture
def layout():
    return backbone_of(random_vit(depth=5)).layout


def matching(layout, **changes):
    sizes = {"depth": layout.depth, "dim": layout.dim, "tokens": layout.tokens, "prefix": layout.prefix}
    return a_table(**{**sizes, **changes})


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"model": "your_vit"}, "another model: 'my_vit', not 'your_vit'"),
        ({"device": "another machine"}, "another device"),
        ({"batch_size": 9}, "another batch size: 8, not 9"),
        ({"dtype": "float16"}, "another number type"),
        ({"mode": "graph"}, "another mode: 'eager', not 'graph'"),
        ({"operator": Operator(operation="prune")}, "another operator: the paper's, not operation prune"),
    ],
)
def test_tables_of_something_else_are_refused(layout, asked, sentence):
    same = {"model": "my_vit", "device": "a machine", "batch_size": 8, "dtype": "float32", "mode": "eager"}
    matching(layout).check(layout, **same)
    matching(layout).check(layout, **same, operator=Operator(importance="class-attention"))  # "auto" here
    by_cost = Operator(operation="merge", choice="cost")
    matching(layout, operator=asdict(by_cost)).check(layout, **same, operator=by_cost.changed(floor=1.0))
    matching(layout).check(layout, None, "a machine")
    with pytest.raises(DiffRateError, match=sentence):
        matching(layout).check(layout, **same | asked)
    with pytest.raises(DiffRateError, match="6 blocks, 32 wide, 65 tokens, 1 prefix tokens, not 5 blocks"):
        matching(layout, depth=6).check(layout, **same)


def test_tables_come_back_as_they_were(tmp_path):
    a_table().save(tmp_path / "table.json")
    assert LatencyTable.load(tmp_path / "table.json") == a_table()
    a_table(last=None).save(tmp_path / "table.json")
    assert LatencyTable.load(tmp_path / "table.json") == a_table(last=None)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "diffrate.latency_table", "version": 1}', '{"format": "x", "version": 1}'],
)
def test_files_that_are_no_table(tmp_path, text):
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(DiffRateError, match=r"table\.json"):
        LatencyTable.load(tmp_path / "table.json")


def test_grid_is_dense_around_multiples_of_16():
    counts = grid(3, 50)
    assert counts == [3, 8, 15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 49, 50]


def test_tokens_such_as_a_removal_leaves_run_on_the_kernels(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    from diffrate import kernels, profiling

    backbone, images = backbone_of(random_vit(patch_size=8).eval()), torch.randn(2, 3, 32, 32)
    operator = diffrate.Operator(importance="class-attention", operation="merge")
    monkeypatch.setattr(kernels, "INTERPRETED", not torch.cuda.is_available())
    with torch.no_grad():
        left = profiling._removed(backbone, 1, images, operator)
        tokens, all_of_them = left(9), left(17)
        assert all_of_them.size is None
        assert tokens.normed is not None
        assert all_of_them.normed is not None
        for name in ("size", "log_size", "normed"):
            assert getattr(tokens, name).shape[1] == 9
        ours = profiling.run_block(backbone, 2, tokens, 7, 6, operator).x
        with kernels.using("plain"):
            wanted = profiling.run_block(backbone, 2, replace(tokens, normed=None), 7, 6, operator).x
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


def test_profile_of_a_small_model(tmp_path, monkeypatch):
    from diffrate import profiling

    last_blocks, real = [], profiling.run_block_for_prefix

    def watched(backbone, i, tokens, operator):
        last_blocks.append((i, tokens.count, tokens.size is not None))
        return real(backbone, i, tokens, operator)

    monkeypatch.setattr(profiling, "run_block_for_prefix", watched)
    model = random_vit(depth=4).train()
    table = profile(model, batch_size=2, repeats=3, name="small")
    # The last block is timed as a compressed model runs it: for the class token alone, on tokens with sizes.
    assert table.last is not None
    assert {n for _, n, _ in last_blocks} == set(table.last.n) == {3, 16, 32, 48, 64, 65}
    assert all(i == 3 and sized == (n < 65) for i, n, sized in last_blocks)
    assert model.training
    assert (table.batch_size, table.dtype, table.model, table.tokens) == (2, "float32", "small", 65)
    assert len(table.checks) >= 5
    assert {tuple(c["kept"]) for c in table.checks} >= {(65, 65, 65, 65)}
    for check in table.checks:  # what the fit says of a schedule is what the cost model says
        kept = torch.tensor(check["kept"]).double()
        assert float(TableCost(table).price(kept)["latency_ms"]) == pytest.approx(check["predicted_ms"])
        assert check["measured_ms"] > 0
    table.save(tmp_path / "table.json")
    assert LatencyTable.load(tmp_path / "table.json") == table


def test_schedules_of_the_check_use_the_operator_that_is_timed():
    model = random_vit(depth=6)
    operator = diffrate.Operator(operation="prune")
    schedules = check_schedules(model, operator)
    assert schedules[0] is None
    assert len(schedules) >= 6
    assert all(s.operator == operator for s in schedules[1:])


@pytest.mark.parametrize("operation", ["prune-merge", "merge-prune", "prune", "merge"])
def test_where_an_operator_prunes_and_merges_both_are_timed(operation, monkeypatch):
    """Merged tokens have sizes, which attention then reckons with, and a merge takes longer than leaving tokens out."""
    from diffrate import profiling

    timed, real = [], profiling.run_block
    monkeypatch.setattr(profiling, "run_block", lambda *given: timed.append(given) or real(*given))
    model = random_vit(depth=6)
    profile(model, batch_size=2, repeats=3, operator=diffrate.Operator(operation=operation))
    removals = [(tokens.count, prune, keep) for _, _, tokens, prune, keep, _ in timed if keep < tokens.count]
    assert max(count - keep for count, _, keep in removals) > 2
    splits = operation in ("prune-merge", "merge-prune")
    for count, prune, keep in removals:
        assert (prune - keep, count - prune) == (
            (count - keep + 1) // 2 * splits,
            (count - keep) // (1 + splits),
        )
    sized = {tokens.size is not None for _, _, tokens, *_ in timed if tokens.count < 65}
    assert sized == {operation != "prune"}
    for schedule in check_schedules(model, diffrate.Operator(operation=operation))[1:]:
        assert any(p > m for p, m in zip(schedule.prune, schedule.merge, strict=True)) == splits


def test_the_fit_finds_scales_and_offset(monkeypatch):
    """Whole models that take twice their parts, three times their removals and 5 ms are predicted without error."""
    from diffrate import profiling

    model = random_vit(depth=6)

    def exact(models, images, repeats):
        table = captured[0]
        sums = [TableCost(table).sums(torch.tensor(m.schedule.effective.merge).double()) for m in models]
        return [float(2 * blocks + 3 * removals + 5) for blocks, removals in sums]

    captured = []
    fitted = profiling._fitted

    def remember(table, schedules, measured):
        captured.append(table)
        return fitted(table, schedules, exact([diffrate.compress(model, s) for s in schedules], None, 1))

    monkeypatch.setattr(profiling, "_fitted", remember)
    monkeypatch.setattr(profiling, "time_models", lambda models, images, repeats, mode: [1.0] * len(models))
    table = profile(model, batch_size=2, repeats=3)
    assert table.fit.blocks == pytest.approx(2, rel=1e-3)
    assert table.fit.removals == pytest.approx(3, rel=1e-3)
    assert table.fit.offset == pytest.approx(5, rel=1e-3)


def test_command(tmp_path, diffrate_cli, monkeypatch):
    flags = ["profile", *TINY_FLAGS, "--batch-size", "2", "--repeats", "3", "--device", "cpu"]
    made = diffrate_cli(*flags, "--output", tmp_path / "table.json", "--json", tmp_path / "out.json")
    assert made.code == 0, made.err
    assert "largest error" in made.out
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    kept = results["checks"][1]["kept"]
    schedule = diffrate.Schedule(kept, kept, operator=fast.OPERATOR.changed(floor=1.0))
    schedule.save(tmp_path / "schedule.json")
    again = ["--table", tmp_path / "table.json", "--schedule", tmp_path / "schedule.json"]
    told = diffrate_cli(*flags, *again, "--json", tmp_path / "again.json")
    assert told.code == 0, told.err
    whole, ours = json.loads((tmp_path / "again.json").read_text())["results"]["checks"]
    assert (whole["kept"], ours["kept"]) == ([17] * 4, list(schedule.effective.merge))
    assert ours["predicted_ms"] == pytest.approx(results["checks"][1]["predicted_ms"])
    with monkeypatch.context() as slow:
        slow.setattr("diffrate.profiling.time_models", lambda models, *_: [1e6] * len(models))
        assert "runs at another speed now" in " ".join(diffrate_cli(*flags, *again).err.split())
    diffrate.Schedule(kept, kept).save(tmp_path / "papers.json")
    papers = ["--schedule", tmp_path / "papers.json"]
    check_refused(diffrate_cli(*flags, *again, *papers), "another operator: operation merge, mean attention")
    check_refused(diffrate_cli(*flags, *again, "--operation", "prune"), "a schedule has its own")
    pruning = diffrate_cli(*flags, "--operation", "prune", "--output", tmp_path / "pruning.json")
    assert pruning.code == 0, pruning.err
    wanted = fast.OPERATOR.changed(operation="prune", importance="class-attention")
    assert LatencyTable.load(tmp_path / "pruning.json").operator == asdict(wanted)
    flags[flags.index("2")] = "3"
    check_refused(diffrate_cli(*flags, *again), "another batch size: 2, not 3")
    check_refused(
        diffrate_cli(*flags, *again, "--dtype", "float16", "--batch-size", "2"), "another number type"
    )
    check_refused(diffrate_cli(*flags), "either --output")
    check_refused(
        diffrate_cli(*flags, "--output", tmp_path / "new.json", "--dtype", "int8"), "--dtype must be"
    )
    check_refused(
        diffrate_cli(*flags, "--output", tmp_path / "new.json", "--mode", "graph"), "needs a CUDA device"
    )
    check_refused(diffrate_cli(*flags, "--output", tmp_path / "new.json", "--mode", "x"), "eager, graph")
    assert not (tmp_path / "new.json").exists()
