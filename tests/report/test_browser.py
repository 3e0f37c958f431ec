"""The page in a real browser: slider, patches, theme and phone, by mouse and by keyboard, without a network.

Needs a Chromium on the machine; skipped where there is none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from diffrate.report import read_run, write_report
from report.runs import HOSTILE, measured_run, plain_run

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = next(filter(None, map(shutil.which, NAMES)), None) or driver.chromium.executable_path
        if not Path(found).is_file():
            pytest.skip("needs a Chromium: none is installed on this machine")
        root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        launched = driver.chromium.launch(executable_path=found, args=root)
        yield launched
        launched.close()


@dataclass
class Seen:
    """A page, and all that went wrong or out while it was open."""

    page: Any
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        page = self.page
        page.on("console", lambda message: self.problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self._asked(request.url))

    def _asked(self, url: str) -> None:
        if not url.startswith(("file:", "data:")):
            self.problems.append(f"request: {url}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = measured_run(tmp_path_factory.mktemp("run"))
    write_report(folder)
    return folder


@pytest.fixture
def opened(browser: Any, folder: Path, request: pytest.FixtureRequest) -> Iterator[Seen]:
    """The page of the measured run, in a context with the marked options; nothing may have gone wrong at the end."""
    options = getattr(request, "param", {})
    context = browser.new_context(**options)
    seen = Seen(context.new_page())
    seen.page.goto((folder / "report.html").as_uri())
    yield seen
    assert seen.page.evaluate("window.hacked") is None
    context.close()
    assert seen.problems == []


def numbers(folder: Path, picture: int, block: int) -> list[int]:
    """What the measurements say about the patches of an image after a block."""
    pictures = read_run(folder).measured["results"]["pictures"]
    return list(map(int, pictures[picture]["blocks"][block - 1]["tokens"].split()))


def on_page(page: Any) -> list[int]:
    tokens: list[int] = page.locator("#stage .cell").evaluate_all(
        "cells => cells.map(c => Number(c.dataset.token))"
    )
    return tokens


def merged_patch(tokens: list[int]) -> int:
    return next(i for i, token in enumerate(tokens) if token >= 0 and tokens.count(token) > 1)


def test_the_slider_moves_through_the_blocks_by_keyboard_and_mouse(opened: Seen, folder: Path) -> None:
    page = opened.page
    slider = page.locator("#block")
    assert slider.input_value() == "2"
    assert on_page(page) == numbers(folder, 0, 2)
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert on_page(page) == numbers(folder, 0, 3)
    left = len({token for token in numbers(folder, 0, 3) if token >= 0})
    assert page.locator("#where").inner_text() == f"3 of 4: {left} of 16 tokens"
    assert slider.get_attribute("aria-valuetext") == f"block 3, {left} of 16 tokens left"
    page.keyboard.press("Home")
    assert on_page(page) == list(range(16))
    box = slider.bounding_box()
    slider.click(position={"x": box["width"] - 4, "y": box["height"] / 2})
    assert slider.input_value() == "4"
    assert on_page(page) == numbers(folder, 0, 4)


def test_colours_are_those_of_the_tokens(opened: Seen, folder: Path) -> None:
    page = opened.page
    page.locator("#block").fill("3")
    tokens = numbers(folder, 0, 3)
    picture = read_run(folder).measured["results"]["pictures"][0]
    colours = [bytes.fromhex(picture["colours"][6 * i : 6 * i + 6]) for i in range(16)]
    cells = page.locator("#stage .cell")
    fills = cells.evaluate_all("cells => cells.map(c => getComputedStyle(c).fill)")
    for token, fill in zip(tokens, fills, strict=True):
        members = [i for i, other in enumerate(tokens) if other == token]
        if token < 0:
            assert fill == "rgb(0, 0, 0)"
        elif len(members) == 1:
            assert fill == "rgba(0, 0, 0, 0)"
        else:
            mean = [sum(colours[i][c] for i in members) / len(members) for c in range(3)]
            shown = list(map(float, fill.removeprefix("rgb(").removesuffix(")").split(",")))
            assert shown == pytest.approx(mean, abs=0.51)
    assert {token < 0 for token in tokens} == {True, False}


def test_pointing_at_a_patch_shows_its_token(opened: Seen, folder: Path) -> None:
    page = opened.page
    page.locator("#block").fill("3")
    tokens = numbers(folder, 0, 3)
    patch = merged_patch(tokens)
    size = tokens.count(tokens[patch])
    page.locator("#stage .cell").nth(patch).hover()
    masses = read_run(folder).measured["results"]["pictures"][0]["blocks"][2]["mass"].split()
    words = page.locator("#patch").inner_text()
    assert f"Token of {size} patches, mass {float(masses[tokens[patch]]):.2f}" in words
    assert f"Patch in row {patch // 4 + 1}, column {patch % 4 + 1}" in words
    holes = page.locator("#stage .shade").get_attribute("d").count("z") - 1
    assert holes == size
    pruned = tokens.index(-1)
    page.locator("#stage .cell").nth(pruned).hover()
    gone = next(b for b in range(1, 5) if numbers(folder, 0, b)[pruned] < 0)
    assert f"Pruned in block {gone}" in page.locator("#patch").inner_text()
    page.mouse.move(2, 2)
    assert "No patch chosen" in page.locator("#patch").inner_text()


def test_patches_can_be_reached_by_keyboard(opened: Seen, folder: Path) -> None:
    page = opened.page
    page.locator("#block").focus()
    page.keyboard.press("Tab")
    focused = "document.activeElement.dataset.patch"
    assert page.evaluate(focused) == "0"
    for key, patch in (
        ("ArrowRight", "1"),
        ("ArrowDown", "5"),
        ("End", "7"),
        ("ArrowUp", "3"),
        ("ArrowUp", "3"),
    ):
        page.keyboard.press(key)
        assert page.evaluate(focused) == patch
    assert "row 1, column 4" in page.locator("#patch").inner_text()
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("row 1, column 4: ")
    cursor = page.locator("#stage .cursor")
    assert cursor.evaluate("c => getComputedStyle(c).visibility") == "visible"  # the focus can be seen
    assert cursor.get_attribute("x") == "24"
    page.keyboard.press("Escape")
    assert "No patch chosen" in page.locator("#patch").inner_text()
    page.keyboard.press("Tab")
    assert page.evaluate(focused) is None  # one stop for the whole image


def test_every_control_shows_its_focus(opened: Seen) -> None:
    page = opened.page
    unseen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        name, outlined = page.evaluate(
            """() => {
              const e = document.activeElement;
              const shown = e.matches('input[type=radio]') ? e.nextElementSibling : e;
              return [e.tagName + '#' + e.id, getComputedStyle(shown).outlineStyle !== 'none'];
            }"""
        )
        if not outlined and not name.startswith(("rect", "BODY")):
            unseen.append(name)
    assert unseen == []


def test_images_are_chosen_by_arrow_keys_and_from_the_cards(opened: Seen, folder: Path) -> None:
    page = opened.page
    page.locator('input[name="picture"]').first.focus()
    page.keyboard.press("ArrowRight")
    assert on_page(page) == numbers(folder, 1, 2)
    assert (
        read_run(folder).measured["results"]["pictures"][1]["label"] in page.locator("#answers").inner_text()
    )
    page.locator("button[data-picture]").nth(0).click()
    assert on_page(page) == numbers(folder, 0, 2)
    assert page.locator('input[name="picture"]').nth(0).is_checked()


def test_it_plays(opened: Seen) -> None:
    page = opened.page
    page.locator("#play").click()
    assert page.locator("#play").inner_text() == "Pause"
    playwright.expect(page.locator("#block")).to_have_value("4", timeout=20_000)
    playwright.expect(page.locator("#play")).to_have_text("Play", timeout=20_000)


@pytest.mark.parametrize(
    "opened", [{"color_scheme": "light"}, {"color_scheme": "dark"}], indirect=True, ids=["light", "dark"]
)
def test_the_theme_is_the_systems_until_it_is_changed(opened: Seen, request: pytest.FixtureRequest) -> None:
    page = opened.page
    dark = "dark" in request.node.name
    bright = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).every(v => v > 128)"
    assert page.evaluate(bright) is not dark
    button = page.locator("#theme")
    assert button.get_attribute("aria-pressed") == str(dark).lower()
    button.focus()
    page.keyboard.press("Enter")
    assert page.evaluate(bright) is dark
    assert button.get_attribute("aria-pressed") == str(not dark).lower()
    page.reload()
    assert page.evaluate(bright) is dark  # it is remembered
    contrast = page.evaluate(CONTRAST)
    assert contrast > 4.5


CONTRAST = """() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const card = light(getComputedStyle(document.querySelector('section')).backgroundColor);
  return Math.min(...[...document.querySelectorAll('section p, section td, section th, dd, dt')].map(e => {
    const ink = light(getComputedStyle(e).color);
    return (Math.max(ink, card) + 0.05) / (Math.min(ink, card) + 0.05);
  }));
}"""

PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}


@pytest.mark.parametrize("opened", [PHONE], indirect=True, ids=["phone"])
def test_a_phone_needs_no_sideways_scrolling_and_takes_taps(opened: Seen, folder: Path) -> None:
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator(".narrow .chart").is_visible()
    assert not page.locator(".wide .chart").is_visible()
    patch = merged_patch(numbers(folder, 0, 2))
    page.locator("#stage .cell").nth(patch).tap()
    assert f"Patch in row {patch // 4 + 1}, column {patch % 4 + 1}" in page.locator("#patch").inner_text()


def test_hostile_names_are_shown_and_do_nothing(opened: Seen) -> None:
    text = opened.page.locator("body").inner_text()
    assert HOSTILE[0] in text
    assert HOSTILE[1] in text


def test_a_page_without_measurements(browser: Any, tmp_path: Path) -> None:
    path = write_report(plain_run(tmp_path))
    seen = Seen(browser.new_page())
    seen.page.goto(path.as_uri())
    seen.page.locator("#theme").click()
    assert "nothing was measured yet" in seen.page.locator("h1").inner_text()
    seen.page.close()
    assert seen.problems == []
