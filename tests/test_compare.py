"""Comparisons: rows at equal MACs, paired as they say, and tables that hold what was measured."""

from __future__ import annotations

import csv
import functools
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import diffrate
from conftest import Ran, check_refused, random_vit, write_image
from diffrate.compare import as_csv, compare, markdown, operators, table
from diffrate.errors import DiffRateError
from diffrate.evaluate import compare_evaluations, evaluate
from diffrate.methods import METHODS, build
from diffrate.methods.by_image import spread_images
from diffrate.methods.policy import PolicyModel
from diffrate.searching import fast
from diffrate.speed import Entrant, Speed, time_rows
from diffrate.speed import compared as speeds_of

SEARCH_FREE = [name for name, m in METHODS.items() if name not in ("search", "published") and not m.trained]
untimed = functools.partial(compare, speed=False)


@pytest.fixture
def model() -> nn.Module:
    return random_vit(depth=6)


@pytest.fixture
def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(30, 3, 32, 32, generator=generator)
    return DataLoader(TensorDataset(images, torch.randint(7, (30,), generator=generator)), batch_size=8)


@pytest.mark.parametrize("name", SEARCH_FREE)
def test_every_method_meets_its_budget_and_runs(model: nn.Module, name: str) -> None:
    images = torch.randn(8, 3, 32, 32)
    budget = 0.6 * diffrate.gmacs(model)
    compared = untimed(model, [(images, torch.arange(8) % 7)], [name], [budget])
    (row,) = compared.rows
    assert row.gmacs == pytest.approx(budget, rel=0.035)  # a token of 65 is more than a percent
    assert row.gmacs <= budget * (1 + 1e-9)
    assert row.evaluation.images == 8
    assert abs(row.to_whole.loss_difference) > 1e-4
    assert row.settings
    assert json.dumps(row.to_dict())


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.52, 0.8])
def test_macs_are_equal_to_a_percent_on_197_tokens(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All methods together, on images in order, as folders of classes are: what the first cost, the last do not."""
    torch.manual_seed(0)
    shape = {"img_size": 28, "patch_size": 2, "in_chans": 1, "embed_dim": 8, "num_heads": 1, "num_classes": 7}
    model = timm.create_model("vit_tiny_patch16_224", **shape).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    monkeypatch.setattr("diffrate.compare.spread_images", functools.partial(spread_images, least=12))
    images = torch.randn(48, 1, 28, 28) * torch.linspace(0.1, 3, 48)[:, None, None, None]
    loader = [(part, torch.arange(len(part)) % 7) for part in images.split(16)]
    budget = share * diffrate.gmacs(model)
    compared = untimed(model, loader, ["published", *SEARCH_FREE], [budget])
    assert not compared.left_out
    for row in compared.rows:
        assert row.gmacs == pytest.approx(budget, rel=0.01), row.method
        assert "off the budget" not in row.note
    # The images do differ: sampled by the setting that the first twelve meet the budget with, all of them do not.
    first = build("ats", model, budget, images[:12])
    assert isinstance(first, PolicyModel)
    with torch.no_grad():
        assert abs(first.image_gmacs(images).mean().item() / budget - 1) > 0.01


def test_rows_are_paired_with_the_whole_model_and_the_first_row(model: nn.Module, loader) -> None:
    whole = diffrate.gmacs(model)
    compared = untimed(model, loader, ["evit", "tome", "resolution"], [0.5 * whole, 0.8 * whole])
    assert [(row.method, round(row.budget / whole, 3)) for row in compared.rows] == [
        (name, share) for share in (0.8, 0.5) for name in ("evit", "tome", "resolution")
    ]
    alone = {
        (row.method, row.budget): evaluate(build(row.method, model, row.budget), loader)
        for row in compared.rows
    }
    reference = evaluate(model, loader)
    assert compared.whole.loss == reference.loss
    for row in compared.rows:
        mine = alone[row.method, row.budget]
        assert torch.equal(row.evaluation.nll, mine.nll)
        assert row.to_whole == compare_evaluations(mine, reference)
        first = alone["evit", row.budget]
        assert row.to_first == (None if row.method == "evit" else compare_evaluations(mine, first))


def test_schedules_set_the_budgets_when_none_is_given(model: nn.Module, loader) -> None:
    kept = (65, 50, 40, 30, 20, 10)
    schedule = diffrate.Schedule(kept, kept)
    cost = diffrate.gmacs(model, schedule)
    compared = untimed(model, loader, ["tome"], schedules={"mine": schedule})
    assert [row.method for row in compared.rows] == ["mine", "tome"]
    assert {row.budget for row in compared.rows} == {cost}
    assert compared.rows[0].gmacs == cost
    with pytest.raises(DiffRateError, match=r"mine costs .* which is none of the budgets"):
        untimed(model, loader, ["tome"], [0.9 * cost], schedules={"mine": schedule})


def test_adaptive_cost_is_the_mean_over_the_evaluated_images(model: nn.Module, loader) -> None:
    budget = 0.6 * diffrate.gmacs(model)
    (row,) = untimed(model, loader, ["ats"], [budget]).rows
    images = loader.dataset.tensors[0]
    sampled = build("ats", model, budget, images)
    assert isinstance(sampled, PolicyModel)
    with torch.no_grad():
        alone = torch.cat([sampled.image_gmacs(image[None]) for image in images])
        batches = [
            sampled.image_counts(batch).amax(0, keepdim=True).expand(len(batch), -1)
            for batch in images.split(8)
        ]
        padded = torch.cat([sampled.gmacs_of_counts(counts) for counts in batches])
    assert row.gmacs == pytest.approx(alone.mean().item())
    assert f"padded to {padded.mean().item():.3g} GMACs" in row.note
    assert padded.mean() > alone.mean()


def test_what_cannot_be_met_is_left_out_and_said(model: nn.Module, loader) -> None:
    compared = untimed(model, loader, ["published", "tome"], "50%")
    assert [row.method for row in compared.rows] == ["tome"]
    assert len(compared.left_out) == 1
    assert "no schedule is published for 6 blocks" in compared.left_out[0]
    with pytest.raises(DiffRateError, match="nothing to compare: published at"):
        untimed(model, loader, ["published"], "50%")


def test_mistakes_are_refused(model: nn.Module, loader) -> None:
    with pytest.raises(DiffRateError, match="no method 'magic'"):
        untimed(model, loader, ["magic"], "50%")
    with pytest.raises(DiffRateError, match="give each method and schedule once"):
        untimed(model, loader, ["tome", "tome"], "50%")
    with pytest.raises(DiffRateError, match="at least one budget"):
        untimed(model, loader, ["tome"])
    with pytest.raises(DiffRateError, match="search needs images"):
        untimed(model, loader, ["search"], "50%")


def test_tables_hold_the_numbers(model: nn.Module, loader) -> None:
    compared = compare(model, loader, ["evit", "tome"], "60%", batch_size=4)
    columns, cells = table(compared)
    assert {len(line) for line in [columns, *cells]} == {10}
    assert [line[1].split()[0] for line in cells] == ["uncompressed", "evit", "tome"]
    for row, line in zip(compared.rows, cells[1:], strict=True):  # 1.2 % below, for EViT's coarse steps
        assert ("off the budget" in line[1]) == (abs(row.gmacs / row.budget - 1) > 0.01)
    lines = markdown(compared).splitlines()
    assert len(lines) == 5
    assert {line.count("|") for line in lines} == {11}
    rows = list(csv.DictReader(io.StringIO(as_csv(compared))))
    tome = compared.rows[1]
    assert float(rows[2]["gmacs"]) == tome.gmacs
    assert float(rows[2]["to_uncompressed_loss_interval_high"]) == tome.to_whole.loss_interval[1]
    assert tome.to_first is not None
    assert float(rows[2]["to_first_mcnemar_p"]) == tome.to_first.mcnemar_p
    assert rows[1]["to_first_mcnemar_p"] == ""
    assert rows[0]["method"] == "uncompressed"
    assert tome.speed is not None
    assert cells[2][-2:] == [f"{tome.speed.images_per_second:.1f}", f"{tome.speed.of_uncompressed:.2f}"]
    assert float(rows[2]["ms"]) == tome.speed.ms
    assert operators(compared.to_dict()["rows"]) == []  # both have rules of their own
    bare = untimed(model, loader, ["tome"], "60%")
    assert {len(line) for line in [*table(bare)[1], table(bare)[0]]} == {8}
    assert next(csv.DictReader(io.StringIO(as_csv(bare))))["ms"] == ""


def test_schedules_under_several_operators_are_said_to_be(model: nn.Module, loader) -> None:
    compared = untimed(model, loader, ["random", "constant-rate", "tome"], "70%,50%")
    words = fast.OPERATOR.in_words()
    expected = ["operator of random: the paper's", f"operator of constant-rate: {words}"]
    assert operators(compared.to_dict()["rows"]) == expected
    assert markdown(compared).endswith(f"|\n\n{expected[0]}\n\n{expected[1]}\n")
    assert operators(untimed(model, loader, ["random"], "50%").to_dict()["rows"]) == []


def test_speeds_are_ratios_to_the_uncompressed_model_on_images_of_the_set(
    model: nn.Module, loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is given: the second row takes half of the first one's second, the third a third."""
    seen: list[torch.Tensor] = []

    def timed(rows: list[Entrant], images: torch.Tensor, dtype: str) -> list[Speed]:
        seen.append(images)
        assert [row.name.split()[0] for row in rows] == ["uncompressed", "evit", "resolution"]
        assert {p.dtype for row in rows for p in row.model.parameters()} == {torch.bfloat16}
        seconds = {row.name: ([1 / (1 + i)], None) for i, row in enumerate(rows)}
        return speeds_of(rows, seconds, len(images), "eager", dtype)

    monkeypatch.setattr("diffrate.compare.time_rows", timed)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    methods = ["evit", "resolution"]
    compared = compare(model, loader, methods, "60%", amp=True, amp_dtype="bfloat16", batch_size=4)
    speeds = [compared.speed, *(row.speed for row in compared.rows)]
    assert [speed and speed.of_uncompressed for speed in speeds] == pytest.approx([1, 2, 3])
    assert [speed and speed.images_per_second for speed in speeds] == pytest.approx([4, 8, 12])
    saved = compared.to_dict()
    assert saved["uncompressed"]["speed"]["ms"] == 1000
    assert saved["rows"][0]["speed"]["ms"] == 500
    assert saved["rows"][1]["speed"]["gmacs"] == compared.rows[1].gmacs
    assert (saved["rows"][0]["speed"]["dtype"], saved["rows"][0]["speed"]["batch_size"]) == ("bfloat16", 4)
    images = loader.dataset.tensors[0]
    assert torch.equal(seen[0], images[[0, 8, 16, 24]].bfloat16())  # every eighth, of 30
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("name", SEARCH_FREE)
def test_every_method_is_timed(model: nn.Module, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffrate.compare.time_rows", functools.partial(time_rows, repeats=1))
    images = torch.randn(4, 3, 32, 32)
    (row,) = compare(model, [(images, torch.arange(4))], [name], "60%", amp=True, amp_dtype="bfloat16").rows
    assert row.speed is not None
    assert (row.speed.batch_size, row.speed.dtype) == (4, "bfloat16")
    assert row.speed.of_uncompressed > 0


def test_command(diffrate_cli: Callable[..., Ran], eval_flags: list[object], tmp_path: Path) -> None:
    kept = tmp_path / "mine.json"
    diffrate.Schedule((17, 12, 8, 5), (17, 12, 8, 5)).save(kept)
    flags = ["compare", *eval_flags[1:], "--schedule", kept, "--methods", "tome,random"]
    ran = diffrate_cli(*flags, "--output", tmp_path / "out", "--json", tmp_path / "again.json")
    assert ran.code == 0, ran.err
    assert [line.split()[1] for line in ran.out.splitlines()[2:5]] == ["mine", "tome", "random"]
    assert "12 images on cpu; speed: eager, float32, 5 images a batch" in ran.out
    assert ran.out.splitlines()[0].endswith("images/s  x whole")
    saved = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert [row["method"] for row in saved["rows"]] == ["mine", "tome", "random"]
    assert saved["rows"][0]["settings"]["schedule"]["merge"] == [17, 12, 8, 5]
    assert saved == json.loads((tmp_path / "again.json").read_text())["results"]
    assert (tmp_path / "out" / "table.md").read_text().count("\n") == 6
    assert (tmp_path / "out" / "table.csv").read_text().count("\n") == 5
    with Image.open(tmp_path / "out" / "plot.png") as picture:
        assert picture.width > 1000


def test_command_searches(
    diffrate_cli: Callable[..., Ran],
    eval_flags: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = functools.partial(diffrate.search, steps=2, batch_size=4, checks=1, held_out=0.2)
    monkeypatch.setattr("diffrate.methods.search", quick)
    for i in range(20):
        write_image(tmp_path / "search" / f"{i:02d}.png", seed=i)
    flags = ["compare", *eval_flags[1:], "--methods", "search,evit", "--budget", "70%"]
    check_refused(diffrate_cli(*flags), "the method search needs --search-dir")
    ran = diffrate_cli(*flags, "--search-dir", tmp_path / "search", "--no-speed")
    assert ran.code == 0, ran.err
    assert "images/s" not in ran.out
    assert not ran.err
    assert [line.split()[1] for line in ran.out.splitlines()[2:4]] == ["search", "evit"]


def test_list_of_methods(diffrate_cli: Callable[..., Ran], tmp_path: Path) -> None:
    ran = diffrate_cli("methods", "--json", tmp_path / "methods.json")
    assert ran.code == 0
    assert [line.split()[0] for line in ran.out.splitlines()[1:]] == list(METHODS)
    listed = json.loads((tmp_path / "methods.json").read_text())["results"]["methods"]
    assert all(method["what"] for method in listed)
    departs = {method["name"]: method["departs"] for method in listed}
    known = {
        "evit": "keep rate from the start",
        "tome": "proportional in every model",
        "tome-decreasing": "running sum is rounded",
        "atm": "in every block",
        "ats": "charges attention for all tokens",
        "evo-vit": "the paper always trains",
    }
    for name, words in known.items():
        assert words in departs[name]
        assert departs[name] in ran.out
    check_refused(
        diffrate_cli("compare", "--model", "vit_tiny_patch16_224", "--methods", "tome"), "give --data-dir"
    )
