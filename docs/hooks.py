"""What mkdocs does beside rendering: the command line's page from the commands, and files of the repository as links.

Pages link to files outside of docs/ as `../results/…`, which is right in a checkout; in the site those files lie
beside the pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the page of the commands, and every file that a page links to."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "cli.md", content=command_line()))
    linked = {
        target
        for page in Path(config.docs_dir).glob("*.md")
        for _, target in OUTSIDE.findall(page.read_text(encoding="utf-8"))
        if _is_shown(target)
    }
    for target in sorted(linked):
        files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files of the repository, as they are in the site; of folders and pages elsewhere the name alone."""
    return OUTSIDE.sub(
        lambda link: f"[{link[1]}]({link[2]})" if _is_shown(link[2]) else f"{link[1]} (`{link[2]}`)", markdown
    )


def _is_shown(target: str) -> bool:
    return (ROOT / target).is_file() and not target.endswith(".md")


def command_line() -> str:
    """Every command with its options, as Markdown."""
    import typer

    from diffrate.cli.app import app

    group: Any = typer.main.get_command(app)
    parts = ["# Command line", "", (group.help or "").strip(), ""]
    for name, command in group.commands.items():
        inner = getattr(command, "commands", {"": command})
        for second, each in inner.items():
            parts += _section(f"diffrate {name} {second}".strip(), each)
    return "\n".join(parts)


def _section(title: str, command: Any) -> list[str]:
    text, _, example = (command.help or "").partition("Example: ")
    lines = [f"## {title}", "", text.strip(), ""]
    if example:
        lines += ["```", example.strip(), "```", ""]
    lines += ["| option | | default |", "| --- | --- | --- |"]
    for option in command.params:
        names = "`, `".join([*option.opts, *option.secondary_opts])
        default = (
            "" if option.default in (None, False, "") or callable(option.default) else f"`{option.default}`"
        )
        default = "required" if option.required else default
        explained = re.sub(r"\[default: .*\]", "", option.help or "").replace("|", r"\|").strip()
        lines.append(f"| `{names}` | {explained} | {default} |")
    return [*lines, ""]
