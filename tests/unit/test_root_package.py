"""The root package: lazy names that a type checker knows all the same."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import django_rmq

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
    assert {name for _, name in seen} | {"__version__"} == set(django_rmq.__all__)


def test_a_name_is_that_of_its_module() -> None:
    for home, names in vars(django_rmq)["_HOMES"].items():
        module = __import__(f"django_rmq.{home}", fromlist=names)
        for name in names:
            assert getattr(django_rmq, name) is getattr(module, name)


def test_the_version_is_the_distributions() -> None:
    from importlib.metadata import version

    assert django_rmq.__version__ == version("django-redis-rmq")


@pytest.mark.slow
def test_a_misspelt_name_is_an_error_to_mypy(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import django_rmq\n"
        "from django_rmq import SendResult, send_message\n"
        "from django_rmq import send_mesage\n"
        "django_rmq.listner\n"
        "result: SendResult = send_message('orders', {})\n"
        "wrong: int = send_message('orders', {})\n"
        "def plain(message: django_rmq.Message) -> int: return int(message.body['sku'])\n"
        "def typed(message: django_rmq.Message[str]) -> int: return message.body\n"
    )
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\nfollow_imports = silent\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(tmp_path / "mypy.ini"), str(program)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [line.partition("program.py:")[2] for line in answer.stdout.splitlines() if "error:" in line]
    assert [int(line.partition(":")[0]) for line in found] == [3, 4, 6, 8], answer.stdout + answer.stderr
    assert "send_mesage" in found[0]
    assert "listner" in found[1]
