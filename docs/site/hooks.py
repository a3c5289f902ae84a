"""What the site adds to the pages: folders in the navigation, and files of the repository.

MkDocs calls the functions that begin with ``on_``.
"""

from __future__ import annotations

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
    """Lead links to the copies."""
    here = posixpath.dirname(page.file.src_uri) or "."
    goals = {
        target: posixpath.relpath("index.md" if path == README else _copy(path), here)
        for target, path in _outside(page.file)
    }
    return LINK.sub(
        lambda found: f"{found[1]}{goals.get(found[2], found[2])}{found[3] or ''}{found[4]}", markdown
    )


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Refuse what a reader's browser would have to fetch from elsewhere."""
    fetched = re.search(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="?https?://[^">]*', output)
    if fetched:
        raise PluginError(f"{page.file.src_uri} fetches {fetched[0]}")
    return output
