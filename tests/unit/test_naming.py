"""The countable rules of names and sizes in CONTRIBUTING.md. A bound here may only become stricter."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef

ADMITTED_CLASSES = {"Command", "Meta", "Migration", "Topic"}
"""Names that Django prescribes; and the model ``Topic``, whose name is in permissions and addresses."""

ADMITTED_MODULES = {"__init__", "urls"}

PARTICIPLES = {"declaring", "failing", "message_tracking", "reslotting"}
"""Modules of Spark that programs import, and nouns that end like participles."""

LARGE_PACKAGES = {"operations": 24}
"""Packages with more than 20 modules. Each of ``operations`` is one subject that people see or act on, and all faces use it."""

LARGE_FUNCTIONS = {
    "send_message": "the options of a send, each named in its signature",
    "ensure_message": "the options of a send",
    "send_messages": "the options of a send",
    "documented": "the parts of a route's description",
    "assign": "one algorithm, whose steps share what they count",
    "__init__": "a coordinator with the values of its settings",
    "search_messages": "the arguments of its script",
    "group_deaths": "the arguments of its script",
}


@cache
def modules() -> dict[str, ast.Module]:
    """Dotted name → source, of all modules of the package but migrations."""
    paths = (path for path in (ROOT / "django_rmq").rglob("*.py") if "migrations" not in path.parts)
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text()) for path in paths
    }


def importers() -> dict[str, set[str]]:
    """Module → the modules of the package that import it."""
    found = defaultdict(set)
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for imported in node.names:
                    whole = f"{node.module}.{imported.name}"
                    found[whole if whole in modules() else node.module].add(name)
    return found


def functions() -> Iterator[FUNCTION]:
    for tree in modules().values():
        yield from (node for node in ast.walk(tree) if isinstance(node, FUNCTION))


def test_a_class_name_occurs_once() -> None:
    names = Counter(
        node.name for tree in modules().values() for node in tree.body if isinstance(node, ast.ClassDef)
    )
    assert {name for name, times in names.items() if times > 1} <= ADMITTED_CLASSES


def test_at_most_eight_module_names_occur_twice() -> None:
    names = Counter(name.rpartition(".")[2] for name in modules())
    assert len({name for name, times in names.items() if times > 1} - ADMITTED_MODULES) <= 8


def test_a_local_is_named_for_what_it_holds() -> None:
    stored = (
        (function.name, node.id)
        for function in functions()
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    assert {name: local for name, local in stored if local in ("found", "told")} == {}


def test_a_function_is_named_for_what_it_does() -> None:
    names = {function.name.lstrip("_").partition("_")[0] for function in functions()}
    assert names & {"tell", "foretell", "complain", "ear"} == set()


def test_a_module_is_a_noun() -> None:
    assert {name for name in (m.rpartition(".")[2] for m in modules()) if name.endswith("ing")} == PARTICIPLES


def test_a_package_has_at_most_twenty_modules() -> None:
    sizes = Counter(
        name.rpartition(".")[0].removeprefix("django_rmq.") for name in modules() if "__init__" not in name
    )
    assert {package: size for package, size in sizes.items() if size > 20} == LARGE_PACKAGES


def test_few_modules_are_small_and_have_one_importer() -> None:
    users = importers()
    lengths = {name: tree.body[-1].end_lineno or 0 for name, tree in modules().items() if tree.body}
    commands = {name for name in lengths if name.startswith("django_rmq.management.commands.")}
    small = {name for name in lengths.keys() - commands if lengths[name] < 100 and len(users[name]) == 1}
    # Five are doors, such as a resource of REST, or the mixin of test cases.
    assert len(small) <= 5, sorted(small)


def test_a_large_function_has_a_reason() -> None:
    large = {
        node.name
        for node in functions()
        if (node.end_lineno or 0) - node.lineno >= 50
        or len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) > 9
    }
    assert large == LARGE_FUNCTIONS.keys()
