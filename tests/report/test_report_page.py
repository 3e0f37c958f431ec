"""The page as a file: what it says, and that nothing in it is markup but its own."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import diffrate
from diffrate.report import write_report
from diffrate.report.page import page
from diffrate.report.run import read_run
from diffrate.report.words import interval, percent, signed
from report.runs import HOSTILE, SCHEDULE, STEPS, measured_run, plain_run, tiny_model


class Page(HTMLParser):
    """Elements with their attributes, and the text outside of style and script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.open[-1:] != ["style"]:
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measured_run(tmp_path_factory.mktemp("run"))


def test_a_measured_run_has_every_section(folder: Path) -> None:
    parsed = Page(page(read_run(folder), "diffrate report x"))
    assert "absent" not in {attributes.get("class") for _, attributes in parsed.elements}
    results = read_run(folder).measured["results"]
    found = results["models"][1]
    assert f"scores {found['top1']:.1f} %" in parsed.words
    assert f"{found['speedup']:.2f} times as fast" in parsed.words
    share = diffrate.gmacs(tiny_model(), SCHEDULE) / diffrate.gmacs(
        tiny_model()
    )  # not what the schedule claims
    assert f"At {100 * share:.0f} % of its cost" in parsed.words
    for row in results["models"]:
        assert f"{row['gmacs']:.3f}" in parsed.words
        assert f"{row['images_per_second']:.0f}" in parsed.words
    for text in ("ToMe", "12 seconds on 1,000 images", "1 image could not be read", "diffrate report x"):
        assert text in parsed.words
    assert any(a.get("id") == "pictures" for _, a in parsed.elements)
    ids = [a["id"] for _, a in parsed.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attributes in parsed.elements:  # every link and label leads somewhere
        for name in ("href", "for", "aria-labelledby"):
            value = attributes.get(name)
            if value and not value.startswith("data:"):
                assert value.removeprefix("#") in ids


def test_hostile_names_stay_text(folder: Path) -> None:
    text = page(read_run(folder), f"diffrate report {HOSTILE[0]}")
    parsed = Page(text)
    assert [dict(a).get("type") for tag, a in parsed.elements if tag == "script"] == [
        "application/json",
        None,
    ]
    assert not [name for _, a in parsed.elements for name in a if name.startswith("on")]
    assert not [
        a for tag, a in parsed.elements if tag == "img" and not str(a.get("src")).startswith("data:image/")
    ]
    visible = "".join(parsed.text)
    for name in HOSTILE:
        assert name in visible  # nothing was dropped either
    names = {p["label"] for p in json.loads(parsed.scripts[0])}
    assert names <= set(HOSTILE)
    assert "window.hacked" not in parsed.scripts[1]


def test_nothing_can_be_loaded_and_no_other_script_can_run(folder: Path) -> None:
    text = page(read_run(folder))
    parsed = Page(text)
    (policy,) = [a["content"] for _, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy"]
    digest = base64.b64encode(hashlib.sha256(parsed.scripts[1].encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )
    style = re.search("<style>(.*?)</style>", text, re.S)
    assert style
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    for _, attributes in parsed.elements:
        for name in ("src", "href", "srcset", "action"):
            assert not re.match("https?:|//", str(attributes.get(name)))


def test_without_images_the_page_says_what_is_absent(tmp_path: Path) -> None:
    path = write_report(plain_run(tmp_path))
    assert path == tmp_path / "report.html"
    parsed = Page(path.read_text(encoding="utf-8"))
    assert "nothing was measured yet" in parsed.words
    assert "At 60" in parsed.words  # 0.0006 of 0.001 GMACs
    for missing in (
        "Accuracy and speed were not measured yet",
        "No images to explore yet",
        "No images were compared",
    ):
        assert missing in parsed.words
    assert parsed.words.count("diffrate report RUN_DIR --data-dir FOLDER") == 3
    assert not any(a.get("id") == "explorer" for _, a in parsed.elements)
    assert "block 2: 12 kept, 2 merged, 3 pruned" in parsed.words


def test_a_schedule_alone_and_old_measurements(tmp_path: Path, folder: Path) -> None:
    SCHEDULE.save(tmp_path / "schedule.json")
    words = Page(page(read_run(tmp_path))).words
    assert "no history of a search" in words
    assert words.count("The folder does not say.") == 2
    run = read_run(folder)
    other = replace(run, schedules=[replace(SCHEDULE, merge=(17, 12, 7, 3))])
    words = Page(page(other)).words
    assert "The measurements in the folder are of other schedules" in words
    assert "times as fast" not in words


def test_several_budgets_each_have_their_charts(tmp_path: Path) -> None:
    run = read_run(plain_run(tmp_path))
    looser = replace(SCHEDULE, made={"budget": "80%"}, cost={"gmacs": 0.0008})
    both = replace(
        run, schedules=[looser, SCHEDULE], steps=[{**step, "budget": "80%"} for step in STEPS] + STEPS
    )
    words = Page(page(both)).words
    assert words.count("Budget 80%") == words.count("Budget 60%") == 2
    single = replace(run, steps=STEPS[:1])  # one step spans no axis
    assert "Loss of the batch" in Page(page(single)).words


def test_costs_beside_macs(tmp_path: Path) -> None:
    run = read_run(plain_run(tmp_path, whole={"gmacs": 0.001, "latency_ms": 20.0}))
    both = replace(
        run, schedules=[replace(SCHEDULE, cost={"gmacs": 0.0006, "latency_ms": 15.0, "other": 1.0})]
    )
    words = Page(page(both)).words
    assert "\u221225 %ms by the cost model20 → 15 ms" in words
    assert "by the cost model" not in Page(page(run)).words


def test_numbers() -> None:
    assert signed(-0.04) == signed(0.04) == "0.0"
    assert signed(-1.25, 2) == "\u22121.25"
    assert signed(3, 0) == "+3"
    assert percent(0.5) == "50\u202f%"
    assert interval((-1, 2)) == "\u22121.0 to +2.0"
