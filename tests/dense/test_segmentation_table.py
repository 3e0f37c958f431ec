"""The table of segmentation in docs/models.md says what the results files say."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_segmentation_table():
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in (ROOT / "docs/models.md").read_text(encoding="utf-8").splitlines()
        if "`segmentation_" in line and line.startswith("|")
    ]
    said: dict[str, list[list[str]]] = {}
    for *row, file in rows:
        said.setdefault(file.strip("`"), []).append(row)
    assert "segmentation_camvid_h200.json" in said
    for file, lines in said.items():
        scores = json.loads((ROOT / "results" / file).read_text())["results"]["scores"]
        whole = scores["whole"]["miou"]
        found = {
            (
                f"{s['miou']:.2f}",
                "" if s["miou"] == whole else f"{s['miou'] - whole:+.2f}",
                f"{s['gmacs']:.2f}",
            )
            for s in scores.values()
        }
        assert {tuple(line[1:]) for line in lines} == found
