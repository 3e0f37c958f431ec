"""Tables of a comparison hold what was measured, each number in its column."""

from __future__ import annotations

import csv
import io
import re

import pytest
import torch
from torch import Tensor, nn

import diffrate
from conftest import random_vit
from diffrate.compare import Compared, Row, compare
from diffrate.comparison_table import as_csv, markdown, operators, remarks, table
from diffrate.evaluate import Comparison, Evaluation
from diffrate.methods.schedules import random_schedule
from diffrate.searching import fast


@pytest.fixture
def model() -> nn.Module:
    return random_vit(depth=6)


@pytest.fixture
def batches() -> list[tuple[Tensor, Tensor]]:
    images = torch.randn(30, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    return [(part, torch.arange(len(part)) % 7) for part in images.split(8)]


def test_tables_hold_the_numbers(model: nn.Module, batches) -> None:
    compared = compare(model, batches, ["evit", "tome"], "60%", batch_size=4)
    columns, cells = table(compared)
    assert {len(line) for line in [columns, *cells]} == {10}
    assert [line[1].split()[0] for line in cells] == ["uncompressed", "evit", "tome"]
    for row, line in zip(compared.rows, cells[1:], strict=True):  # 1.2 % below, for EViT's coarse steps
        assert ("off the budget" in line[1]) == (abs(row.gmacs / row.budget - 1) > 0.01)
    assert columns[6] == "points to evit"
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
    bare = compare(model, batches, ["tome"], "60%", speed=False)
    assert {len(line) for line in [*table(bare)[1], table(bare)[0]]} == {8}
    assert next(csv.DictReader(io.StringIO(as_csv(bare))))["ms"] == ""


def test_cells_of_a_table_are_the_differences_and_intervals_of_their_columns() -> None:
    """Numbers that no two columns share."""

    def evaluation(top1: float) -> Evaluation:
        nothing = torch.zeros(0)
        return Evaluation(top1, 99.0, 0.7, 400, 50.0, nothing, nothing, nothing, nothing)

    def comparison(points: float, loss: float, p: float) -> Comparison:
        return Comparison(
            points, 0.11, loss, 0.012, 5, 9, 30, 400, (points - 2, points + 3), (loss - 0.2, loss + 0.3), p
        )

    to_whole = comparison(-1.25, 0.456, 0.031), comparison(-4.5, 0.789, 0.0022)
    first = Row("evit", 0.61, 0.6012, evaluation(81.5), to_whole[0], None, {})
    other = Row(
        "tome", 0.61, 0.5987, evaluation(78.25), to_whole[1], comparison(-3.25, 0.333, 0.47), {}, "a note"
    )
    columns, cells = table(Compared(evaluation(82.75), 1.2346, [first, other], []))
    assert columns[2:] == ["GMACs", "top-1 %", "points to whole", "loss rise", "points to evit", "p"]
    assert cells[0] == ["", "uncompressed", "1.235", "82.75", "", "", "", ""]
    points, loss = "-1.25 [-3.25, +1.75]", "+0.456 [+0.256, +0.756]"
    assert cells[1] == ["0.61", "evit", "0.601", "81.50", points, loss, "", ""]
    points, loss, to_first = "-4.50 [-6.50, -1.50]", "+0.789 [+0.589, +1.089]", "-3.25 [-5.25, -0.25]"
    assert cells[2] == ["0.61", "tome (a note)", "0.599", "78.25", points, loss, to_first, "0.47"]


def test_schedules_under_several_operators_are_said_to_be(model: nn.Module, batches) -> None:
    compared = compare(model, batches, ["random", "constant-rate", "tome"], "70%,50%", speed=False)
    words = fast.OPERATOR.in_words()
    expected = ["operator of random: the paper's", f"operator of constant-rate: {words}"]
    assert operators(compared.to_dict()["rows"]) == expected
    assert markdown(compared).endswith(f"|\n\n{expected[0]}\n\n{expected[1]}\n")
    assert operators(compare(model, batches, ["random"], "50%", speed=False).to_dict()["rows"]) == []


def test_what_stands_below_a_table_says_who_was_compared_with_whom_and_what_is_missing(
    model: nn.Module, batches
) -> None:
    schedules = {"mine": random_schedule(model, 0.6 * diffrate.gmacs(model))}
    compared = compare(model, batches, ["tome", "published"], "60%,50%", schedules, speed=False)
    assert len(compared.left_out) == 2
    high, low = (f"{row.budget:.3g}" for row in compared.rows if row.to_first is None)
    assert table(compared)[0][6] == "points to first"
    said = f"compared with the first row of each budget: mine at {high} GMACs; tome at {low} GMACs"
    assert remarks(compared) == [said]
    text = markdown(compared, "a title", "`diffrate compare`, a machine")
    title, _, *missing, firsts, origin = text.removesuffix("\n").split("\n\n")
    assert (title, firsts, origin) == ("# a title", said, "`diffrate compare`, a machine")
    assert missing == [f"left out: {each}" for each in compared.left_out]


def test_names_do_not_break_a_markdown_table(model: nn.Module, batches) -> None:
    schedules = {"a|b": random_schedule(model, 0.5 * diffrate.gmacs(model))}
    lines = markdown(compare(model, batches, schedules=schedules, speed=False)).splitlines()
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in lines] == [9] * 4
    assert lines[-1].split(" | ")[1] == r"a\|b"
