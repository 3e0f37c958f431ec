"""The token explorer, which the page's script brings to life, and what changed most: classes and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diffrate.report.charts import share_mark
from diffrate.report.html import Html, data, joined, tag
from diffrate.report.words import percent, signed

LISTED = 10  # classes


def explorer(pictures: Sequence[Mapping[str, Any]]) -> Html:
    """Pick an image, slide through the blocks, point at a patch."""
    choices = [
        tag(
            "label",
            tag("input", type="radio", name="picture", value=i, checked=i == 0),
            tag("img", src=picture["image"], alt="", width=64, height=64),
            tag("span", picture["label"]),
            title=picture["name"],
        )
        for i, picture in enumerate(pictures)
    ]
    depth = max(len(picture["blocks"]) for picture in pictures)
    controls = tag(
        "div",
        tag("button", "Play", type="button", id="play"),
        tag("label", "Block", for_="block"),
        tag("input", type="range", id="block", min=0, max=depth, value=depth // 2, step=1),
        tag("output", id="where", for_="block"),
        class_="controls",
    )
    keys = "Arrow keys move between patches, Escape lets go."
    return tag(
        "div",
        tag("noscript", tag("p", "The token explorer needs JavaScript.")),
        tag("fieldset", tag("legend", "Image"), tag("div", choices, class_="choices"), class_="picker"),
        controls,
        tag(
            "div",
            tag(
                "div",
                tag("svg", id="stage", role="grid", aria_label=f"Patches of the image. {keys}"),
                class_="stage",
            ),
            tag(
                "div",
                tag("dl", id="answers", class_="answers"),
                tag("div", id="patch", class_="patch", aria_live="polite"),
                tag("div", id="life", class_="life"),
                tag(
                    "ul",
                    tag("li", tag("span", class_="swatch untouched"), "a token of its own"),
                    tag("li", tag("span", class_="swatch mixed"), "merged: the token's mean colour"),
                    tag("li", tag("span", class_="swatch black"), "pruned"),
                    class_="legend",
                ),
                tag("p", f"Point at a patch, or tap it, to see the token it joined. {keys}", class_="hint"),
                class_="facts",
            ),
            class_="scene",
        ),
        data([_for_script(picture) for picture in pictures], "pictures"),
        id="explorer",
    )


def _for_script(picture: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: picture[key] for key in ("name", "label", "before", "after", "size", "grid", "colours", "blocks")
    }


def changed_classes(classes: Sequence[Mapping[str, Any]]) -> Html:
    """The classes whose share of right answers moved most, worst first."""
    moved = [c for c in classes if c["after"] != c["before"]]
    if not moved:
        return tag("p", "No class gained or lost a right answer.")
    moved.sort(key=lambda c: -abs(c["after"] - c["before"]) / c["images"])
    most = sorted(moved[:LISTED], key=lambda c: (c["after"] - c["before"]) / c["images"])
    heads = ("class", "right before → after", "change", "loss rise")
    head = tag("tr", [tag("th", text, scope="col") for text in heads])
    rows = []
    for c in most:
        before, after = c["before"] / c["images"], c["after"] / c["images"]
        words = f"{c['before']} → {c['after']} of {c['images']}"
        cells = [
            [share_mark(before, after, words), tag("span", words, class_="number")],
            f"{signed(c['after'] - c['before'], 0)} image{'s' * (abs(c['after'] - c['before']) > 1)}",
            signed(c["loss_rise"], 3),
        ]
        rows.append(
            tag(
                "tr",
                tag("th", c["name"], scope="row"),
                [tag("td", cell, data_label=heads[i + 1]) for i, cell in enumerate(cells)],
            )
        )
    few = min(c["images"] for c in classes)
    words = f"{len(moved)} of {len(classes)} classes changed; ring: before, dot: after."
    if few < 50:
        words += f" With as few as {few} image{'s' * (few > 1)} a class, much of this is chance."
    return joined(
        tag("table", tag("thead", head), tag("tbody", rows), class_="stacks classes"),
        tag("p", words, class_="hint"),
    )


def changed_images(pictures: Sequence[Mapping[str, Any]]) -> Html | None:
    """Cards of the images whose loss changed most, each a way into the explorer."""
    cards = [_card(i, picture) for i, picture in enumerate(pictures) if picture["changed"]]
    return tag("ul", cards, class_="cards") if cards else None


def _card(i: int, picture: Mapping[str, Any]) -> Html:
    rise = picture["after"]["loss"] - picture["before"]["loss"]
    return tag(
        "li",
        tag("img", src=picture["image"], alt=f"An image of {picture['label']}", width=112, height=112),
        tag(
            "div",
            tag("strong", picture["label"]),
            tag("dl", _answer("before", picture["before"]), _answer("after", picture["after"])),
            tag("small", f"loss {signed(rise, 2)}"),
            tag("button", "Explore", type="button", data_picture=i, aria_label=f"Explore {picture['name']}"),
        ),
    )


def _answer(when: str, answer: Mapping[str, Any]) -> Html:
    style = "right" if answer["correct"] else "wrong"
    words = f"{answer['class']} {percent(answer['share'])}"
    return joined(tag("dt", when), tag("dd", words, class_=style))
