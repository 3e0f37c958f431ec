"""Comparisons: rows at equal MACs, paired as they say, and tables that hold what was measured."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import diffrate
from conftest import random_vit
from diffrate import kernels, speed
from diffrate.compare import compare
from diffrate.comparison_table import speed_line, table
from diffrate.errors import DiffRateError
from diffrate.evaluate import compare_evaluations, evaluate
from diffrate.methods import METHODS, build, to_train
from diffrate.methods.by_image import spread_images
from diffrate.methods.policy import PolicyModel
from diffrate.plots import accuracy_figure
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


def test_schedules_of_one_name_have_a_row_at_each_budget(model: nn.Module, loader) -> None:
    loose, tight = (build("constant-rate", model, s * diffrate.gmacs(model)).schedule for s in (0.8, 0.5))
    compared = untimed(model, loader, ["tome"], schedules={"mine": [tight, loose]})
    assert [row.method for row in compared.rows] == ["mine", "tome"] * 2
    assert [row.settings["schedule"]["merge"] for row in compared.rows[::2]] == [
        list(loose.merge),
        list(tight.merge),
    ]
    with pytest.raises(DiffRateError, match=r"two of the name mine meet the budget of 0\.\d+ GMACs"):
        untimed(model, loader, ["tome"], schedules={"mine": [tight, tight]})


def test_tuned_models_stand_beside_untouched_ones_of_their_method(model: nn.Module, loader) -> None:
    tuned = build("tome", random_vit(depth=6), 0.6 * diffrate.gmacs(model))
    nn.init.zeros_(tuned.original.head.weight)
    assert isinstance(tuned, PolicyModel)
    compared = untimed(model, loader, ["tome"], "60%", trained={"tome, tuned": tuned})
    assert [row.method for row in compared.rows] == ["tome, tuned", "tome"]
    assert compared.rows[0].evaluation.loss == pytest.approx(math.log(7), abs=0.2)
    with pytest.raises(DiffRateError, match="no two of them one name"):
        untimed(model, loader, ["tome"], "60%", trained={"tome": tuned})


def test_a_tuned_model_that_decides_image_by_image_is_compared_at_its_mean_cost(
    model: nn.Module, loader
) -> None:
    budget = 0.6 * diffrate.gmacs(model)
    tuned = to_train("ats", random_vit(depth=6), budget, spread_images(loader))
    assert diffrate.gmacs(tuned) > 1.01 * budget  # what an image may cost at most, beyond the tolerance
    compared = untimed(model, loader, ["tome"], [budget], trained={"ats, tuned": tuned})
    assert [row.method for row in compared.rows] == ["ats, tuned", "tome"]
    (alone,) = untimed(model, loader, [], trained={"ats, tuned": tuned}).rows
    assert alone.budget == pytest.approx(alone.gmacs)
    assert alone.gmacs == pytest.approx(budget, rel=0.02)


def test_the_plot_has_accuracy_against_cost_and_speed(
    model: nn.Module, loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffrate.compare.time_rows", functools.partial(time_rows, repeats=1))
    methods = [name for name in SEARCH_FREE if name != "ats"]
    schedules = {
        f"schedule {i}": build("random", model, 0.6 * diffrate.gmacs(model)).schedule for i in range(2)
    }
    compared = compare(model, loader, methods, "80%,60%", schedules, batch_size=2)
    figure = accuracy_figure(compared.to_dict(), "a title")
    assert figure.get_suptitle() == "a title"
    cost, speed = figure.axes
    assert (cost.get_xlabel().split(",")[0], speed.get_xlabel()) == ("GMACs", "images per second")
    names = list(dict.fromkeys(row.method for row in compared.rows))
    assert len(names) > 10
    lines, aside = {axes: axes.containers for axes in (cost, speed)}, set()
    for axes, drawn in lines.items():
        assert [each.get_label() for each in drawn] == names
        looks = {(each.lines[0].get_color(), each.lines[0].get_marker()) for each in drawn}
        assert len(looks) == len(names)
        for name, each in zip(names, drawn, strict=True):
            rows = [row for row in compared.rows if row.method == name]
            x, y = each.lines[0].get_data()
            assert list(y) == [row.evaluation.top1 for row in rows]
            if axes is cost:  # set aside a little, each by as much as no other
                assert list(x) == pytest.approx([row.gmacs for row in rows], rel=0.05)
                aside.add(round(x[0] - rows[0].gmacs, 9))
            else:
                assert list(x) == [row.speed.images_per_second for row in rows]
            ends = [segment[:, 1].tolist() for segment in each.lines[2][0].get_segments()]
            intervals = [row.to_whole.top1_interval for row in rows]
            assert ends == [pytest.approx([compared.whole.top1 + end for end in both]) for both in intervals]
    assert len(aside) == len(names)
    first, *others = (each.lines[0].get_linewidth() for each in lines[cost])
    assert first > max(others)
    assert (
        len({line.get_marker() for drawn in lines.values() for line in (each.lines[0] for each in drawn)}) > 1
    )
    assert compared.with_kernels is None
    assert "uncompressed" in speed.get_legend_handles_labels()[1]
    beside = replace(compared, with_kernels=replace(compared.speed, images_per_second=123.0))
    cost, speed = accuracy_figure(beside.to_dict()).axes
    stars = {line.get_label(): line.get_data() for line in speed.get_lines()}
    assert stars["uncompressed, with our kernels"] == ([123.0], [compared.whole.top1])
    assert "uncompressed, with our kernels" not in cost.get_legend_handles_labels()[1]


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


@pytest.mark.parametrize("budget", ["100%", "120%"])
def test_a_budget_of_the_whole_model_asks_for_nothing(model: nn.Module, loader, budget: str) -> None:
    with pytest.raises(DiffRateError, match=r"asks for nothing: the whole model costs \d"):
        untimed(model, loader, ["tome"], f"50%,{budget}")
    schedules = {"all": diffrate.Schedule.identity(6, 65)}
    if budget == "100%":
        compared = untimed(model, loader, ["tome"], f"50%,{budget}", schedules)
        assert [row.method for row in compared.rows] == ["all", "tome"]
        assert compared.rows[0].to_whole.top1_difference == 0
        assert len(compared.left_out) == 1
        assert compared.left_out[0].startswith("tome at ")
    else:
        with pytest.raises(DiffRateError, match="which is none of the budgets"):
            untimed(model, loader, ["tome"], f"50%,{budget}", schedules)


def test_speeds_are_ratios_to_the_uncompressed_model_on_images_of_the_set(
    model: nn.Module, loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is given: the second row takes half of the first one's second, the third a third."""
    seen: list[torch.Tensor] = []

    def timed(rows: list[Entrant], images: torch.Tensor, mode: str, dtype: str) -> list[Speed]:
        seen.append(images)
        assert [row.name.split()[0] for row in rows] == ["uncompressed", "evit", "resolution"]
        assert {p.dtype for row in rows for p in row.model.parameters()} == {torch.bfloat16}
        seconds = {row.name: ([1 / (1 + i)], None) for i, row in enumerate(rows)}
        return speeds_of(rows, seconds, len(images), mode, dtype)

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


def test_what_decides_by_image_is_timed_eager_and_says_so(
    model: nn.Module, loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str] = []
    prepared = speed._prepared

    def noted(run: nn.Module, images: torch.Tensor, mode: str) -> Any:
        modes.append(mode)
        return prepared(run, images, "eager")

    monkeypatch.setattr(speed, "_prepared", noted)
    monkeypatch.setattr("diffrate.compare.time_rows", functools.partial(time_rows, repeats=1))
    compared = compare(model, loader, ["evit", "ats"], "60%", mode="compiled", batch_size=4)
    assert modes == ["compiled", "compiled", "eager"]
    assert [row.speed and row.speed.mode for row in compared.rows] == ["compiled", "eager"]
    assert [row.note.endswith("timed eager") for row in compared.rows] == [False, True]
    assert speed_line(compared) == "; speed: compiled, float32, 4 images a batch"


def test_a_mode_that_is_not_there_is_refused_before_anything_runs(model: nn.Module) -> None:
    for mode, reason in (("fast", "a mode is one of eager, compiled"), ("graph", "needs a CUDA device")):
        with pytest.raises(DiffRateError, match=reason):
            compare(model, [], ["tome"], "60%", mode=mode)


def test_what_cannot_be_timed_is_left_out_and_no_row_is_lost(
    model: nn.Module, loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[Speed]:
        raise next(failures)

    failures = iter([RuntimeError("not permitted when stream is capturing\nand more"), NotImplementedError()])

    monkeypatch.setattr("diffrate.compare.time_rows", broken)
    compared = compare(model, loader, ["tome"], "60%", mode="compiled")
    assert compared.left_out == ["speed in mode compiled: not permitted when stream is capturing"]
    (said,) = compare(model, loader, ["tome"], "60%").left_out
    assert said == "speed in mode eager: NotImplementedError"
    assert [row.method for row in compared.rows] == ["tome"]
    assert compared.speed is None
    assert "images/s" not in table(compared)[0]


def test_the_uncompressed_model_is_also_timed_with_the_kernels_of_compressed_ones(
    model: nn.Module, loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "INTERPRETED", True)  # as on a GPU
    monkeypatch.setattr("diffrate.compare.time_rows", functools.partial(time_rows, repeats=1))
    compared = compare(model, loader, ["evit"], "60%", amp=True, amp_dtype="bfloat16", batch_size=4)
    assert compared.with_kernels is not None
    assert compared.with_kernels.name == "uncompressed, with our kernels"
    saved = compared.to_dict()["uncompressed"]
    assert saved["speed_with_kernels"]["of_uncompressed"] == compared.with_kernels.of_uncompressed
    assert speed_line(compared).endswith(
        f"with our kernels: {compared.with_kernels.of_uncompressed:.2f} x whole"
    )
    assert [row.method for row in compared.rows] == ["evit"]
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    assert compare(model, loader, ["evit"], "60%", batch_size=4).with_kernels is None


def test_times_that_differ_much_say_so(model: nn.Module, loader, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(rows: list[Entrant], images: torch.Tensor, mode: str, dtype: str) -> list[Speed]:
        spread = {"evit": [1.0, 1.0, 2.0, 3.0, 3.0]}
        found = {
            row.name: (spread.get(row.name.split()[0], [2.0, 2.05, 2.1, 2.1, 2.1]), None) for row in rows
        }
        return speeds_of(rows, found, len(images), mode, dtype)

    monkeypatch.setattr("diffrate.compare.time_rows", timed)
    rows = compare(model, loader, ["evit", "tome"], "60%").rows
    assert ["times differ by 100%" in row.note for row in rows] == [True, False]


def test_lower_resolution_is_not_compiled_anew_at_every_turn(
    model: nn.Module, loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: dict[str, str] = {}

    def timed(rows: list[Entrant], images: torch.Tensor, mode: str, dtype: str) -> list[Speed]:
        modes.update({row.name.split()[0]: row.mode(mode) for row in rows})
        return speeds_of(rows, {row.name: ([1.0, 1.0], None) for row in rows}, len(images), mode, dtype)

    monkeypatch.setattr("diffrate.compare.time_rows", timed)
    for mode, expected in (("compiled", "eager"), ("eager", "eager")):
        compare(model, loader, ["resolution", "tome"], "60%", mode=mode)
        assert modes == {"uncompressed": mode, "resolution": expected, "tome": mode}


def test_a_mode_is_not_looked_at_where_nothing_is_timed(model: nn.Module, loader) -> None:
    assert untimed(model, loader, ["tome"], "60%", mode="graph").rows
