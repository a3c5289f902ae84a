"""Hold the texts of the project to plain English: the words of ``style.toml``, and lines of at most 100 columns in docs/.

It reads all pages, the docstrings of the packages (those of attributes included), the comments of the scripts, and what
the programs print or show: every string with a space in it, and the texts of the templates.

    python tests/style.py            reports what it finds
    python tests/style.py --wrap     wraps the prose of docs/ and the README first

Code, tables, addresses and quoted texts are not checked. ``codespell`` checks the spelling.
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
WORDS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
Rules = list[tuple[re.Pattern[str], str]]


def rules(table: str) -> Rules:
    """Return the words of a table of ``style.toml`` that a text avoids, and what to say instead."""
    return [
        (re.compile(rf"(?i)(?<![\w-])(?:{pattern})(?!\w)"), better)
        for pattern, better in WORDS[table].items()
    ]


RULES = rules("instead")
MESSAGE_RULES = RULES + rules("messages")
COLUMNS = 100
PACKAGES = ("django_rmq", "pyspark_rmq")
PROGRAMS = (*PACKAGES, "example_project")
"""They print or show texts."""

NOT_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)|<[^>]+>|\*\"[^\"]*\"\*")
TRANSLATED = re.compile(r'\{% translate "([^"]*)"')
TAGS = re.compile(r"\{#.*?#\}|\{%.*?%\}|\{\{.*?\}\}|<(?:[^<>\"]|\"[^\"]*\")*>", re.DOTALL)
FENCE = re.compile(r"\s*(```|~~~)")
BEGIN = re.compile(r"<!-- (?!end )\w+ -->$")
APART = re.compile(
    r"- (Takes|Default|Unit|Example|Registered): |\s*(#|\||<!--|:::|!\[|\[\^?\w+\]:|---|$)|    (?! *[-*\d])"
)
"""Lines that belong to no paragraph, and what `make reference` writes below the keys of the settings."""
ITEM = re.compile(r"\s*([-*]|\d+\.|:) +")


def pages() -> list[Path]:
    """Return every tracked page."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def strings(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield each string of a module with its line, and whether it is a docstring; placeholders become an ellipsis."""
    docs: set[int] = set()
    parts: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr):
            docs.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
            said = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield node.lineno, "".join(said), False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value, id(node) in docs


def shown_by(template: str) -> str:
    """Return the texts of a template, each on its line."""
    lines = zip(
        template.split("\n"),
        TAGS.sub(lambda found: "\n" * found[0].count("\n"), template).split("\n"),
        strict=True,
    )
    return "\n".join(" | ".join((text, *TRANSLATED.findall(line))) for line, text in lines)


def texts() -> Iterator[tuple[Path, int, str, Rules]]:
    """Yield each docstring, comment of a script and text of a program, with its file, line and rules."""
    for program in PROGRAMS:
        for path in sorted((ROOT / program).rglob("*.py")):
            for line, text, is_docstring in strings(path):
                if is_docstring and program in PACKAGES:
                    yield path, line, text, RULES
                elif not is_docstring and " " in text:
                    yield path, line, text, MESSAGE_RULES
        for path in sorted((ROOT / program).rglob("*.html")):
            yield path, 1, shown_by(path.read_text()), MESSAGE_RULES
        for path in sorted((ROOT / program).rglob("*.lua")):
            yield path, 1, "\n".join(line.partition("--")[2] for line in path.read_text().split("\n")), RULES


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


def findings(text: str, wrapped: bool = False, avoided: Rules = RULES) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with a text, with the number of the line."""
    for number, line in outside_code(text):
        prose = NOT_PROSE.sub("…", line)
        for rule, better in avoided:
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
    for path, start, text, avoided in texts():
        for number, what in findings(text, avoided=avoided):
            print(f"{path.relative_to(ROOT)}:{start + number - 1}: {what}")
            count += 1
    return count


if __name__ == "__main__":
    sys.exit(bool(main()))
