"""The root package: lazy names that a type checker knows all the same."""

from __future__ import annotations

import ast
from pathlib import Path

import django_rmq
from django_rmq import exceptions

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "django_rmq/__init__.py"


def test_what_type_checkers_see_is_what_is_there() -> None:
    tree = ast.parse(SOURCE.read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {
        (f"django_rmq.{home}", name) for home, names in vars(django_rmq)["_HOMES"].items() for name in names
    }
    assert seen == homes
    errors = {
        name
        for name, value in vars(exceptions).items()
        if isinstance(value, type) and getattr(django_rmq, name, None) is value
    }
    assert {name for _, name in seen} | errors | {"__version__"} == set(django_rmq.__all__)


def test_a_name_is_that_of_its_module() -> None:
    for home, names in vars(django_rmq)["_HOMES"].items():
        module = __import__(f"django_rmq.{home}", fromlist=names)
        for name in names:
            assert getattr(django_rmq, name) is getattr(module, name)


def test_the_version_is_the_distributions() -> None:
    from importlib.metadata import version

    assert django_rmq.__version__ == version("django-redis-rmq")
