"""The speed tables in the documentation are those of the results files."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def speed_table():
    if not (ROOT / "reproduce").is_dir():
        pytest.skip("the scripts in reproduce/ are not part of this copy")
    return runpy.run_path(str(ROOT / "reproduce" / "speed_table.py"))


def test_a_table_has_one_line_a_schedule(speed_table):
    common = {"model": "m", "dtype": "float16", "batch_size": 8, "mode": "eager", "gmacs": 2.0}
    rows = [
        {**common, "name": "uncompressed", "images_per_second": 1000.0, "of_oracle": None, "of_uncompressed": 1.0},
        {**common, "name": "oracle slice", "images_per_second": 2000.0, "of_oracle": None, "of_uncompressed": 2.0},
        {**common, "name": "a", "images_per_second": 1900.0, "of_oracle": 0.95, "of_uncompressed": 1.9},
        {**common, "name": "a", "images_per_second": 1.0, "of_oracle": 0.1, "of_uncompressed": 0.1, "kernels": "sdpa"},
    ]  # fmt: skip
    record = {"command": "c", "device": "d", "torch": "t", "commit": "0" * 40, "results": {"rows": rows}}
    lines = speed_table["table"](record, "speed_x.json").splitlines()
    assert lines[2] == "| m | 2.0 | float16 | 8 | eager | 1,900 | 2,000 | 0.950 | 1.90 | |"
    assert sum("| m |" in line for line in lines) == 1
    assert "results/speed_x.json" in lines[-1]
    with_kernels = {**rows[0], "name": "uncompressed, with our kernels", "of_uncompressed": 1.25}
    record["results"]["rows"] = [rows[0], with_kernels, *rows[1:3], *rows[:3]]
    lines = [line for line in speed_table["table"](record, "speed_x.json").splitlines() if "| m |" in line]
    assert [line.rpartition("0.950 ")[2] for line in lines] == [
        "| 1.90 | 1.52 |",
        "| 1.90 | |",
    ]  # of its own run alone
    fused = {**rows[2], "mode": "compiled"}
    record["results"]["rows"] = [*rows, fused, {**fused, "dtype": "bfloat16"}]
    short = speed_table["table"](record, "speed_x.json", short=True).splitlines()
    assert [line for line in short if "| m |" in line] == [lines[-1].replace("eager", "compiled")]


def test_a_page_keeps_all_but_its_table(speed_table):
    text = "before\n<!-- speed -->\nold\n<!-- /speed -->\nafter"
    words = ["before", "<!--", "speed", "-->", "<!--", "/speed", "-->", "after"]
    assert speed_table["rewritten"](text, []).split() == words
    with pytest.raises(SystemExit):
        speed_table["rewritten"]("<!-- speed -->", [])


@pytest.mark.parametrize("page", ["README.md", "docs/speed.md"])
def test_the_documented_tables_are_up_to_date(speed_table, page):
    path = ROOT / page
    if not path.is_file() or "<!-- speed -->" not in (text := path.read_text(encoding="utf-8")):
        pytest.skip(f"{page} has no speed table")
    files = sorted((ROOT / "results").glob("speed_*.json"))
    assert speed_table["rewritten"](text, files, speed_table["PAGES"][page]) == text
