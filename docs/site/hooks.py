"""What the site adds to the pages: folders in the navigation, files of the repository, and the options of all commands.

MkDocs calls the functions that begin with ``on_``.
"""

from __future__ import annotations

import argparse
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
COMMAND = re.compile(r"<!-- options of (\w+) -->")
README = "README.md"
"""On the site its place is taken by the home page."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of a folder in the place of its name."""
    config.nav = _with_folders(config.nav or [])
    return config


def _with_folders(items: list[Any]) -> list[Any]:
    found = []
    for item in items:
        if isinstance(item, dict):
            ((title, value),) = item.items()
            pages = _with_folders(value) if isinstance(value, list) else value
            if isinstance(value, str) and value.endswith("/"):
                pages = _pages(value)
            if pages:
                found.append({title: pages})
        else:
            found.append(item)
    return found


def _pages(folder: str) -> list[str]:
    """Return the pages of a folder, its index first."""
    names = sorted(path.name for path in (ROOT / "docs" / folder).glob("*.md"))
    return [folder + name for name in sorted(names, key=lambda name: name != "index.md")]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Copy what the pages link to outside docs/ into the site, so that no link leads out of it."""
    named = {outside for page in files.documentation_pages() for _, outside in _outside(page)}
    for path in sorted(named - {README}):
        if not (ROOT / path).is_file():
            raise PluginError(f"a page links to {path}, which is no file of the repository")
        files.append(File.generated(config, _copy(path), abs_src_path=str(ROOT / path)))
    return files


def _outside(page: File) -> Iterator[tuple[str, str]]:
    """Yield each link of a page that leads out of docs/, and the path in the repository that it names."""
    for found in LINK.finditer(page.content_string):
        target = found[2]
        if "://" not in target and not target.startswith(("mailto:", "/")):
            path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.src_uri), target))
            if not path.startswith("docs/"):
                yield target, path


def _copy(path: str) -> str:
    """Return where a file of the repository is on the site. Markdown is shown as text."""
    return f"files/{path.removesuffix('.md')}.txt" if path.endswith(".md") else f"files/{path}"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to the copies, and fill in the options of commands."""
    here = posixpath.dirname(page.file.src_uri) or "."
    goals = {
        target: posixpath.relpath("index.md" if path == README else _copy(path), here)
        for target, path in _outside(page.file)
    }
    markdown = LINK.sub(
        lambda found: f"{found[1]}{goals.get(found[2], found[2])}{found[3] or ''}{found[4]}", markdown
    )
    return COMMAND.sub(lambda found: options_of(found[1]), markdown)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Refuse what a reader's browser would have to fetch from elsewhere."""
    fetched = re.search(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="?https?://[^">]*', output)
    if fetched:
        raise PluginError(f"{page.file.src_uri} fetches {fetched[0]}")
    return output


def options_of(command: str) -> str:
    """Return a command's usage and a table of its own options, from its parser."""
    import django
    from django.conf import settings
    from django.core.management import BaseCommand, load_command_class

    if not settings.configured:
        settings.configure(INSTALLED_APPS=["django_rmq"], RMQ={"BROKER": "memory"}, USE_I18N=False)
        django.setup()
    parser = load_command_class("django_rmq", command).create_parser("manage.py", command)
    known = {action.dest for action in BaseCommand().create_parser("manage.py", "any")._actions}
    rows = [row for row in map(_row, parser._actions) if row[0] not in known]
    table = "\n".join(f"| {names} | {text} |" for _, names, text in rows)
    return f"{parser.description or ''}\n\n| argument | meaning |\n|---|---|\n{table}"


def _row(action: argparse.Action) -> tuple[str, str, str]:
    """Return an option's name in the code, as it is typed, and what it means."""
    value = "" if action.nargs == 0 else _value(action)
    names = [f"`{name}{' ' + value if value else ''}`" for name in action.option_strings] or [f"`{value}`"]
    text = (action.help or "") % {**vars(action), "prog": "manage.py"}
    return action.dest, ", ".join(names), text.replace("|", "\\|")


def _value(action: argparse.Action) -> str:
    """Return how the value of an option is written in a usage line."""
    name = "/".join(map(str, action.choices)) if action.choices else action.metavar or action.dest
    if isinstance(name, tuple):
        return " ".join(name)
    name = name if action.metavar or action.choices or not action.option_strings else name.upper()
    return {"*": f"[{name} ...]", "+": f"{name} ...", "?": f"[{name}]"}.get(str(action.nargs), name)
