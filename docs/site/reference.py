"""Writes what the pages of the reference repeat of the code, between the marks ``<!-- begin: … -->`` and ``<!-- end -->``.

    python docs/site/reference.py      writes it (`make reference`), the lists of settings.py and the navigation

``<!-- begin: options of rmqstats -->`` holds the description and the options of a command; those that several have
stand once, in ``options of several commands``. ``<!-- begin: django_rmq.Message:
body, raw -->`` holds the signature and the docstrings of a public name, and of these members; without members all
public ones, and with ``none`` none. A test says if a page is not what this writes.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
sys.path.insert(0, str(DOCS.parent))
COLUMNS = 100
PART = re.compile(r"(<!-- begin: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
NAVIGATION = DOCS.parent / "mkdocs.yml"
FIRST = "send_message"
"""The function whose options the signatures of others repeat by their names alone."""
PAGES = [DOCS / "reference/commands.md", DOCS / "reference/python.md"]


def filled(page: str) -> str:
    """Return the page with its generated parts as the code is now."""
    return PART.sub(lambda part: f"{part[1]}\n{generated(part[2])}\n\n{part[3]}", page)


def generated(what: str) -> str:
    """Return the part for a mark: of a command, or of a public name and its members."""
    if what.startswith("options of "):
        return options_of(what.removeprefix("options of "))
    name, _, members = " ".join(what.split()).partition(": ")
    return about(name, members.split(", ") if members else None)


def with_decisions(nav: str) -> str:
    """Return mkdocs.yml with every decision in the navigation, so that a new one needs no line by hand."""
    head, mark, rest = nav.partition("      - Decisions:\n")
    listed = "".join(
        f"          - decisions/{page.name}\n" for page in sorted((DOCS / "decisions").glob("*.md"))
    )
    return head + mark + listed + re.sub(r"\A(?:          - decisions/.*\n)*", "", rest)


# --- commands


SHARED = "several commands"
"""The part with the options that more than one command has in the same words."""


def options_of(command: str) -> str:
    """Return a command's description and a table of its own options, from its parser, or the options of ``SHARED``."""
    shared = _shared_options()
    if command == SHARED:
        return _table(shared)
    parser = _parser_of(command)
    rows = _rows_of(parser)
    own = [row for row in rows if row not in shared]
    others = ", ".join(row[0] for row in rows if row in shared)
    if others:
        own.append((others, "[as in other commands](#options-of-several-commands)"))
    return f"{_paragraphs(parser.description or '')}\n\n{_table(own)}"


@cache
def _shared_options() -> Mapping[tuple[str, str], None]:
    """Return the rows that several commands have in common. Of an option with several texts the most usual one is among them."""
    commands = DOCS.parent.glob("django_rmq/management/commands/rmq*.py")
    counted = Counter(row for path in sorted(commands) for row in _rows_of(_parser_of(path.stem)) if row[1])
    usual: dict[str, tuple[str, str]] = {}
    for row, number in counted.most_common():
        if number > 1:
            usual.setdefault(row[0], row)
    return dict.fromkeys(row for row in counted if usual.get(row[0]) == row)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    lines = "\n".join(f"| {names} | {text} |" for names, text in rows)
    return f"| argument | meaning |\n|---|---|\n{lines}"


def _parser_of(command: str) -> argparse.ArgumentParser:
    import django
    from django.conf import settings
    from django.core.management import load_command_class

    if not settings.configured:
        settings.configure(INSTALLED_APPS=["django_rmq"], RMQ={"BROKER": "memory"}, USE_I18N=False)
        django.setup()
    return load_command_class("django_rmq", command).create_parser("manage.py", command)


def _rows_of(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Return the options that not every command of Django has: how each is typed, and what it means."""
    from django.core.management import BaseCommand

    known = {action.dest for action in BaseCommand().create_parser("manage.py", "any")._actions}
    return [(names, text) for dest, names, text in map(_row, parser._actions) if dest not in known]


def _row(action: argparse.Action) -> tuple[str, str, str]:
    """Return an option's name in the code, as it is typed, and what it means."""
    value = "" if action.nargs == 0 else _value(action)
    names = [f"`{name}{' ' + value if value else ''}`" for name in action.option_strings] or [f"`{value}`"]
    text = (action.help or "").replace(" (default: none)", "") % {**vars(action), "prog": "manage.py"}
    return action.dest, ", ".join(names), text.replace("|", "\\|")


def _value(action: argparse.Action) -> str:
    """Return how the value of an option is written in a usage line."""
    name = "/".join(map(str, action.choices)) if action.choices else action.metavar or action.dest
    if isinstance(name, tuple):
        return " ".join(name)
    name = name if action.metavar or action.choices or not action.option_strings else name.upper()
    return {"*": f"[{name} ...]", "+": f"{name} ...", "?": f"[{name}]"}.get(str(action.nargs), name)


# --- public names


def about(path: str, members: list[str] | None) -> str:
    """Return the heading, the signature and the docstring of a public name, and those of its ``members``."""
    module, _, name = path.rpartition(".")
    value = getattr(import_module(module), name)
    node = _node_of(value)
    parts = [f"### {name}", _signature(node), _paragraphs(inspect.getdoc(value) or "")]
    if isinstance(value, type) and members != ["none"]:
        found = dict(_members(value, all_bases=members is not None))
        parts += [found[member] for member in members or found]
    return "\n\n".join(parts)


def _node_of(value: Any) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value)))).body
    assert isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    if inspect.iscoroutinefunction(value) and isinstance(node, ast.FunctionDef):
        # It has the parameters of the function from which it is made, and whose name it says.
        parameters = ast.arguments(
            posonlyargs=[], args=[ast.arg("...")], kwonlyargs=[], kw_defaults=[], defaults=[]
        )
        return ast.AsyncFunctionDef(**{**vars(node), "name": value.__name__, "args": parameters})
    return node


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"```text\nclass {node.name}{f'({bases})' if bases else ''}\n```"
    return f"```text\n{_call(node)}\n```"


def _call(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return how a function or method is called, with types; a parameter a line if one line cannot hold it."""
    head = f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}{node.name}"
    tail = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = node.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args = arguments.args[1:]
    parameters = list(_parameters(arguments))
    line = f"{head}({', '.join(parameters)}){tail}"
    if len(line) <= COLUMNS:
        return line
    return f"{head}(\n" + "".join(f"    {each},\n" for each in _without_repeated(parameters)) + f"){tail}"


def _without_repeated(parameters: list[str]) -> list[str]:
    """Return the parameters of a call; if it has most options of ``FIRST``, too, these by their names alone."""
    node = _node_of(getattr(import_module("django_rmq"), FIRST))
    assert isinstance(node, ast.FunctionDef)
    options = list(_parameters(node.args))
    repeated = {each for each in parameters if "=" in each and each in options}
    if parameters == options or len(repeated) < len(options) / 2:
        return parameters
    shown: list[str] = []
    for is_repeated, group in groupby(parameters, lambda each: each in repeated):
        names = list(group)
        if is_repeated:
            as_first = ", ".join(each.partition(":")[0] for each in names) + f": as in {FIRST}"
            names = textwrap.wrap(as_first, COLUMNS - 5, subsequent_indent="    ")
            names = ["\n".join(names)]
        shown += names
    return shown


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[Any] = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for each, default in zip(plain, defaults, strict=True):
        yield _parameter(each, default)
    if arguments.vararg or arguments.kwonlyargs:
        yield f"*{ast.unparse(arguments.vararg)}" if arguments.vararg else "*"
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(each, default)
    # Others are refused: that is for the error, not for readers.
    if arguments.kwarg and arguments.kwarg.arg != "unknown":
        yield f"**{ast.unparse(arguments.kwarg)}"


def _parameter(each: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(each) + (f" = {ast.unparse(default)}" if default is not None else "")


def _members(kind: type, *, all_bases: bool) -> Iterator[tuple[str, str]]:
    """Yield each public member of a class that has a docstring, and what the page says of it, as in the code.

    Without ``all_bases`` those of a base that has an entry of its own are left out.
    """
    public = import_module("django_rmq").__all__
    for each in reversed(kind.__mro__):
        if not each.__module__.startswith("django_rmq"):
            continue
        if each is not kind and each.__name__ in public and not all_bases:
            continue
        body = _node_of(each)
        assert isinstance(body, ast.ClassDef)
        assigned = ""
        for node in [*body.body, *_initialised(body)]:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and assigned:
                yield assigned, _term(f"`{assigned}`", str(node.value.value))
            assigned = _name_of(node)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
                text = ast.get_docstring(node) or ""
                is_value = any(ast.unparse(each).endswith("property") for each in node.decorator_list)
                if text:
                    yield node.name, _term(f"`{node.name if is_value else _call(node)}`", text)


def _initialised(body: ast.ClassDef) -> Iterator[ast.stmt]:
    """Yield the statements of ``__init__``, which give attributes their values and docstrings."""
    for node in body.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            yield from node.body[1 if ast.get_docstring(node) else 0 :]


def _name_of(node: ast.stmt) -> str:
    """Return the name of the public attribute that a statement assigns. Empty: it assigns none."""
    target: Any = node.target if isinstance(node, ast.AnnAssign) else None
    if isinstance(node, ast.Assign):
        (target, *_) = node.targets
    name = target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")
    return "" if name.startswith("_") else name


def _term(name: str, text: str) -> str:
    first, *more = _paragraphs(inspect.cleandoc(text), "    ").split("\n\n")
    return "\n\n".join([f"{name}\n:   {first.strip()}", *more])


def _paragraphs(text: str, indent: str = "") -> str:
    """Return the paragraphs of a docstring in Markdown, wrapped; an indented paragraph stays as it is."""
    found = []
    for paragraph in text.replace("``", "`").split("\n\n"):
        kept = paragraph.startswith((" ", "-")) or "\n    " in paragraph
        found.append(
            textwrap.indent(paragraph, indent)
            if kept
            else textwrap.fill(
                " ".join(paragraph.split()),
                COLUMNS,
                initial_indent=indent,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n\n".join(found)


if __name__ == "__main__":
    from docs.site import settings as table

    for each in PAGES:
        each.write_text(filled(each.read_text()))
    table.PAGE.write_text(table.filled(table.PAGE.read_text()))
    NAVIGATION.write_text(with_decisions(NAVIGATION.read_text()))
