"""Markup: what is text stays text."""

import json
import re

from diffrate.report.html import Html, data, joined, tag
from report.runs import HOSTILE


def test_elements() -> None:
    assert tag("p", "a", 1, None, [tag("b", "c"), "d"], class_="x", aria_label="y") == (
        '<p class="x" aria-label="y">a1<b>c</b>d</p>'
    )
    assert tag("input", checked=True, disabled=False, value=None, name="n") == '<input checked name="n">'
    assert tag("svg", viewBox="0 0 1 1") == '<svg viewBox="0 0 1 1"></svg>'
    assert isinstance(joined("a"), Html)


def test_text_and_attributes_are_escaped() -> None:
    for text in HOSTILE:
        made = tag("p", text, title=text)
        inside = re.fullmatch(r'<p title="([^"<>]*)">([^<>]*)</p>', made)
        assert inside, made


def test_data_cannot_end_its_element() -> None:
    made = data({"names": HOSTILE}, "x")
    inside = re.fullmatch(r'<script type="application/json" id="x">(.*)</script>', made)
    assert inside
    assert not re.search("[<>&\u2028]", inside[1])
    assert json.loads(inside[1]) == {"names": list(HOSTILE)}
