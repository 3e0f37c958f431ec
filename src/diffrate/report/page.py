"""The page: one HTML file with its style, script, images and data inside, which asks nothing of the network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffrate
from diffrate.report import course, explorer, result
from diffrate.report.html import Html, joined, tag
from diffrate.report.measured import is_measured
from diffrate.report.run import Run, read_run
from diffrate.results import check_target, origin
from diffrate.schedule import write_text

FOLDER = Path(__file__).parent
NAME = "report.html"
HOW = "diffrate report RUN_DIR --data-dir FOLDER"


def write_report(run_dir: Path, output: Path | None = None, command: str = "diffrate report") -> Path:
    """Write the page about a run folder, to `report.html` in it where nothing else is said."""
    target = run_dir / NAME if output is None else output
    check_target(target)
    write_text(target, page(read_run(run_dir), command))
    return target


def page(run: Run, command: str = "diffrate report") -> str:
    """The whole page as text. What the run lacks is said in its place."""
    measured = is_measured(run)
    results: Mapping[str, Any] = run.measured["results"] if measured else {}
    style, script = ((FOLDER / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    title = f"{run.model or run.folder.name}: diffrate report"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Html(style)),
    )
    sections = _sections(run, results, command)
    body = tag(
        "body",
        tag("a", "Skip to the result", href="#result", class_="skip"),
        _header(run, [(id_, name) for id_, name, _ in sections]),
        tag(
            "main",
            tag("h1", result.sentence(run, results), id="result"),
            result.tiles(run, results),
            [
                tag(
                    "section",
                    tag("h2", name, id=f"{id_}-title"),
                    content,
                    id=id_,
                    aria_labelledby=f"{id_}-title",
                )
                for id_, name, content in sections
            ],
        ),
        tag("footer", f"diffrate {diffrate.__version__}"),
        tag("script", Html(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _policy(script: str) -> str:
    """Nothing may be loaded, and no script may run but the page's own."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _header(run: Run, sections: list[tuple[str, str]]) -> Html:
    links = [tag("li", tag("a", name, href=f"#{id_}")) for id_, name in sections]
    return tag(
        "header",
        tag("p", tag("b", "diffrate"), tag("span", run.model or run.folder.name), class_="brand"),
        tag("nav", tag("ul", links), aria_label="Sections"),
        tag(
            "button", tag("span", "◐", aria_hidden="true"), type="button", id="theme", aria_label="Dark theme"
        ),
    )


def _sections(run: Run, results: Mapping[str, Any], command: str) -> list[tuple[str, str, Html]]:
    pictures = results.get("pictures") or []
    changed = None
    if results:
        changed = joined(
            tag("h3", "Images"),
            explorer.changed_images(pictures) or tag("p", "No image was kept."),
            tag("h3", "Classes"),
            explorer.changed_classes(results["classes"]),
        )
    return [
        ("comparison", "Compared", _compared(run, results)),
        ("kept", "Kept tokens", course.kept(run)),
        (
            "explore",
            "Token explorer",
            explorer.explorer(pictures) if pictures else _absent("No images to explore"),
        ),
        ("changed", "What changed most", changed or _absent("No images were compared")),
        ("search", "The search", _search(run)),
        ("made", "How this was made", _made(run, results, command)),
    ]


def _absent(what: str) -> Html:
    return tag("p", f"{what} yet: ", tag("code", HOW), " adds this.", class_="absent")


def _compared(run: Run, results: Mapping[str, Any]) -> Html:
    if not results:
        stale = bool(run.measured)
        return _absent("The measurements in the folder are of other schedules; nothing is known of these" if stale else
                       "Accuracy and speed were not measured")  # fmt: skip
    whole = results["models"][0]
    words = [
        f"{whole['images']:,} images that every model saw, in turns; intervals are of 95 %, paired image by image. "
        f"Speed is the batches' median in forward passes on {run.measured.get('device', 'an unknown device')}."
    ]
    words += [f"Left out: {reason}" for reason in results.get("left_out", [])]
    return joined(result.comparison(results), [tag("p", text, class_="hint") for text in words])


def _search(run: Run) -> Html:
    shown = course.course(run)
    if shown is None:
        return tag("p", "The folder has no history of a search.", class_="absent")
    words = []
    if run.seconds is not None:
        images = run.config.get("images")
        words.append(
            f"{run.seconds:.0f} seconds" + (f" on {images:,} images" if isinstance(images, int) else "")
        )
    if run.unreadable:
        words.append(f"{len(run.unreadable)} image{'s' * (len(run.unreadable) > 1)} could not be read")
    return joined(shown, tag("p", "; ".join(words) + ".", class_="hint") if words else None)


def _made(run: Run, results: Mapping[str, Any], command: str) -> Html:
    steps = {
        "Search": run.made,
        "Measurements": run.measured if results else {},
        "This page": origin(command),
    }
    parts = []
    for name, made in steps.items():
        if not made:
            parts.append([tag("h3", name), tag("p", "The folder does not say.", class_="absent")])
            continue
        text = tag("code", made.get("command", ""))
        parts.append(
            [
                tag("h3", name),
                tag("pre", text, tabindex=0, role="group", aria_label=f"Command: {name}"),
                tag("p", _versions(made), class_="versions"),
            ]
        )
    settings = {**run.config, **({"asked": results["asked"]} if results.get("asked") else {})}
    rows = [
        tag("tr", tag("th", key, scope="row"), tag("td", _plain(value))) for key, value in settings.items()
    ]
    if rows:
        table = tag("table", tag("tbody", rows), class_="numbers settings")
        parts.append([tag("details", tag("summary", "Settings"), table)])
    return joined(parts)


def _versions(made: Mapping[str, Any]) -> str:
    """When, with which code and libraries, and where, on one line."""
    commit = made.get("commit")
    known = {
        "": str(made.get("date") or "").replace("T", " ").replace("+00:00", " UTC"),
        "diffrate": made.get("diffrate"),
        "commit": f"{str(commit)[:10]}{' with changes' if str(commit).endswith('-dirty') else ''}"
        if commit
        else None,
        "Python": made.get("python"),
        "torch": made.get("torch"),
        "timm": made.get("timm"),
        "on": made.get("device"),
    }
    return " · ".join(f"{name} {value}".strip() for name, value in known.items() if value)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(
            f"{key} {_plain(each)}" for key, each in value.items() if each not in (None, "", {}, [])
        )
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return str(value)
