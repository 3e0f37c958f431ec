"""Speed rows: what is timed is what it says, and every ratio follows from the times."""

import functools
import gc
import json

import pytest
import torch

import diffrate
from conftest import TINY_FLAGS, check_refused, random_vit
from diffrate import DiffRateError, Schedule, kernels, speed
from diffrate.kernels import patches

SCHEDULE = Schedule([17, 15, 12, 6], [17, 12, 12, 3])


@pytest.fixture
def model():
    return random_vit(patch_size=8, depth=4)


def test_the_oracle_slice_cuts_after_attention(model):
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        x = model._pos_embed(model.patch_embed(images))
        for block, keep in zip(model.blocks, (17, 12, 12, 3), strict=True):
            x = (x + block.attn(block.norm1(x)))[:, :keep]
            x = x + block.mlp(block.norm2(x))
        wanted = model.head(model.norm(x)[:, 0])
        ours = speed.OracleSlice(model, SCHEDULE)(images)
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
        whole = speed.OracleSlice(model, Schedule.identity(4, 17))
        assert torch.equal(whole(images), model(images))


def test_baselines_with_patches_by_product(model, monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    projected = []
    project = patches.project
    monkeypatch.setattr(patches, "project", lambda *given: projected.append(1) or project(*given))
    model, images = model.bfloat16(), torch.randn(2, 3, 32, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        for baseline in (model, speed.OracleSlice(model, SCHEDULE)):
            faster = speed.PatchesByProduct(baseline)
            torch.testing.assert_close(faster(images), baseline(images), atol=0.05, rtol=0.05)
    assert len(projected) == 2


def test_entrants(model):
    names = [row.name for row in speed.entrants(model, {"a": SCHEDULE}, baselines=True)]
    assert names == ["uncompressed", "oracle slice", "a", "ToMe", "EViT"]
    fair = speed.entrants(model, {"a": SCHEDULE}, products=True)
    whole = ["uncompressed", "uncompressed, patches by product", "uncompressed, with our kernels"]
    oracle = ["oracle slice", "oracle slice, patches by product"]
    assert [row.name for row in fair] == [*whole, *oracle, "a"]
    assert [row.oracle for row in fair] == [None] * 5 + ["oracle slice"]
    assert fair[2].model.original is model
    assert not fair[2].model.exactly
    assert fair[2].gmacs == diffrate.gmacs(model)
    rows = speed.entrants(model, {"a": SCHEDULE, "b": Schedule.identity(4, 17)})
    assert [(row.name, row.oracle) for row in rows] == [
        ("uncompressed", None),
        ("oracle slice, a", None),
        ("a", "oracle slice, a"),
        ("oracle slice, b", None),
        ("b", "oracle slice, b"),
    ]
    assert rows[0].gmacs == rows[4].gmacs == diffrate.gmacs(model)
    assert rows[2].gmacs == rows[1].gmacs == diffrate.gmacs(model, SCHEDULE)
    assert isinstance(rows[1].model, speed.OracleSlice)
    assert rows[2].model.schedule == SCHEDULE


def test_every_ratio_follows_from_the_times(model, monkeypatch):
    seconds = {"uncompressed": [4.0, 2.0, 3.0], "oracle slice": [1.0] * 3, "a": [2.0, 1.0, 1.5]}
    monkeypatch.setattr(speed, "_measure", lambda *_: {name: (s, 0.5) for name, s in seconds.items()})
    (rows,) = speed.bench(model, {"a": SCHEDULE}, [6])
    whole, oracle, ours = rows
    assert (whole.ms, oracle.ms, ours.ms) == (3000, 1000, 1500)
    assert (whole.images_per_second, ours.images_per_second) == (2, 4)
    assert (whole.of_uncompressed, oracle.of_uncompressed, ours.of_uncompressed) == (1, 3, 2)
    assert ours.of_oracle == pytest.approx(1 / 1.5)
    assert whole.of_oracle is oracle.of_oracle is whole.saved_share is None
    saved = 1 - diffrate.gmacs(model, SCHEDULE) / diffrate.gmacs(model)
    assert ours.saved_share == pytest.approx(0.5 / saved)  # half of the time went, and this share of the MACs
    assert ours.peak_gib == 0.5
    assert whole.spread_ms > oracle.spread_ms == 0


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_times_are_measured_and_the_model_stays_as_it_is(model, mode, monkeypatch):
    wrapped = []  # compiling itself takes minutes here, and is tested with the kernels
    monkeypatch.setattr(torch, "compile", lambda module, **options: wrapped.append(options) or module)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.train()
    found = list(speed.bench(model, {"a": SCHEDULE}, [1, 3], dtype="bfloat16", modes=[mode], repeats=2))
    assert [(rows[0].batch_size, rows[0].mode) for rows in found] == [(1, mode), (3, mode)]
    for rows in found:
        assert [row.name for row in rows] == ["uncompressed", "oracle slice", "a"]
        for row in rows:
            assert row.ms > 0
            assert row.images_per_second == pytest.approx(1000 * row.batch_size / row.ms)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert wrapped == [{"fullgraph": True, "dynamic": False}] * (6 if mode == "compiled" else 0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"modes": ["fast"]}, "a mode is one of"),
        ({"modes": ["graph"]}, "needs a CUDA device"),
        ({"path": "cuda"}, "path must be one of"),
    ],
)
def test_mistakes(model, arguments, sentence):
    with pytest.raises(DiffRateError, match=sentence):
        list(speed.bench(model, {"a": SCHEDULE}, [1], **arguments))


def test_profile_names_the_steps(model):
    whole = speed.profile(model, None, 2)
    fast = speed.profile(model, SCHEDULE, 2)
    assert whole["ranking"] == whole["merge"] == 0
    assert whole["attention and MLP"] > 0
    for name in ("embedding", "attention", "ranking", "merge", "MLP", "head"):
        assert fast[name] > 0, name
    assert set(fast) == set(whole) == {*speed.STEPS, "the rest"}


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def bench_flags(tmp_path):
    SCHEDULE.save(tmp_path / "s.json")
    flags = ["bench", *TINY_FLAGS, "--device", "cpu", "--repeats", 4]
    return [*flags, "--schedule", tmp_path / "s.json"]


def test_bench_command(diffrate_cli, bench_flags, tmp_path):
    name = str(tmp_path / "s.json")
    ran = diffrate_cli(
        *bench_flags, "--batch-size", "1,2", "--baselines", "--profile", "--json", tmp_path / "out.json",
        "--plot", tmp_path / "out.png", "--accuracy", "uncompressed=80.5", "--accuracy", f"{name}=79",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(row["batch_size"], row["name"]) for row in results["rows"]] == [
        (batch, row) for batch in (1, 2) for row in ("uncompressed", "oracle slice", name, "ToMe", "EViT")
    ]  # fmt: skip
    assert [row["accuracy"] for row in results["rows"]] == [80.5, None, 79, None, None] * 2
    assert [p["name"] for p in results["profiles"]] == ["uncompressed", name] * 2
    for word in ("oracle slice", "x oracle", "of MACs saved", "EViT", "ranking"):
        assert word in ran.out
    assert (tmp_path / "out.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--batch-size", "many"], "--batch-size takes numbers"),
        (["--batch-size", "0"], "at least one image"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--mode", "graph"], "needs a CUDA device"),
        (["--kernels", "cuda"], "path must be one of"),
        (["--plot", "speed.png"], "give some --accuracy"),
        (["--accuracy", "uncompressed"], "--accuracy takes ROW=PERCENT"),
        (["--amp"], "--amp is for --search"),
        (["--search"], "takes no schedule"),
    ],
)
def test_bench_mistakes(diffrate_cli, bench_flags, flags, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(diffrate_cli(*bench_flags, *flags), sentence)
    assert [path.name for path in tmp_path.iterdir()] == ["s.json"]


def test_an_accuracy_of_no_row_is_refused_before_anything_is_timed(diffrate_cli, bench_flags, monkeypatch):
    monkeypatch.setattr(speed, "_measure", functools.partial(pytest.fail, "timed"))
    check_refused(diffrate_cli(*bench_flags, "--accuracy", "nothing=80"), "there is no row nothing")


def test_nothing_is_collected_while_a_call_is_timed():
    enabled = []
    speed.in_turns({"a": lambda: enabled.append(gc.isenabled())}, 2, torch.device("cpu"))
    assert not any(enabled)
    assert gc.isenabled()
