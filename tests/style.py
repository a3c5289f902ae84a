"""Hold the texts of the project to plain English: the words of ``style.toml``, and lines of at most 100 columns in docs/.

It reads all pages, and the docstrings of all modules of the packages, those of attributes included.

    python tests/style.py            complains of what it finds
    python tests/style.py --wrap     wraps the prose of docs/ and the README first

Code, tables, addresses and quoted texts are left alone. The spelling is ``codespell``'s business.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
INSTEAD: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["instead"]
RULES = [(re.compile(rf"(?i)(?<![\w-])(?:{pattern})(?!\w)"), better) for pattern, better in INSTEAD.items()]
COLUMNS = 100
PACKAGES = ("django_rmq", "pyspark_rmq")

NOT_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)|<[^>]+>|\*\"[^\"]*\"\*")
FENCE = re.compile(r"\s*(```|~~~)")
BEGIN = re.compile(r"<!-- (?!end )\w+ -->$")
APART = re.compile(r"\s*(#|\||<!--|:::|!\[|\[\^?\w+\]:|---|$)|    (?! *[-*\d])")
"""Lines that belong to no paragraph."""
ITEM = re.compile(r"\s*([-*]|\d+\.|:) +")


def pages() -> list[Path]:
    """Return every tracked page."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def docstrings() -> Iterator[tuple[Path, int, str]]:
    """Yield each docstring of the packages, of attributes too, with its file and first line."""
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield path, node.lineno, node.value.value


def is_wrapped(page: Path) -> bool:
    """Return whether a page is held to its columns."""
    return page == ROOT / "README.md" or ROOT / "docs" in page.parents


def outside_code(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line that is in no fenced block and was written by no program, with its number."""
    inside = generated = False
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line):
            inside = not inside
            continue
        generated = bool(BEGIN.match(line)) or (generated and line != "<!-- end -->")
        if not inside and not generated:
            yield number, line


def findings(text: str, wrapped: bool) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with a page, with the number of the line."""
    for number, line in outside_code(text):
        prose = NOT_PROSE.sub("…", line)
        for rule, better in RULES:
            for found in rule.finditer(prose):
                yield number, f"{found[0].strip()!r}: say {better}"
        if (
            wrapped
            and len(line) > COLUMNS
            and not APART.match(line)
            and " " in _kept(line)[:COLUMNS].strip(" -*")
        ):
            yield number, f"{len(line)} columns: run python tests/style.py --wrap"


def rewrapped(text: str) -> str:
    """Return a page with its paragraphs and list items wrapped."""
    done: list[str] = []
    paragraph: list[str] = []
    prose = {number for number, line in outside_code(text) if not APART.match(line)}

    def finish() -> None:
        if paragraph:
            first = ITEM.match(paragraph[0])
            indent = re.match(r" *", paragraph[0])[0] if first is None else " " * first.end()  # type: ignore[index]
            start = re.match(r" *", paragraph[0])[0] if first is None else first[0]  # type: ignore[index]
            words = " ".join(line.strip() for line in paragraph)[len(start.strip()) :].strip()
            done.extend(_wrap(words, start, indent))
            paragraph.clear()

    for number, line in enumerate(text.splitlines(), 1):
        if number not in prose:
            finish()
            done.append(line)
            continue
        if ITEM.match(line):
            finish()
        paragraph.append(line)
    finish()
    return "\n".join(done) + "\n"


def _kept(words: str) -> str:
    """Return words with other blanks in code and in the texts of links, which are not broken."""
    return re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", lambda found: found[0].replace(" ", "\0"), words)


def _wrap(words: str, start: str, indent: str) -> list[str]:
    """Wrap words."""
    lines = textwrap.wrap(
        _kept(words),
        COLUMNS,
        initial_indent=start,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


def main() -> int:
    """Complain; return how many findings there are."""
    count = 0
    for page in pages():
        if "--wrap" in sys.argv and is_wrapped(page):
            page.write_text(rewrapped(page.read_text()))
        for number, what in findings(page.read_text(), is_wrapped(page)):
            print(f"{page.relative_to(ROOT)}:{number}: {what}")
            count += 1
    for path, start, text in docstrings():
        for number, what in findings(text, False):
            print(f"{path.relative_to(ROOT)}:{start + number - 1}: {what}")
            count += 1
    return count


if __name__ == "__main__":
    sys.exit(bool(main()))
