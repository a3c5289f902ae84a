"""Each recipe of docs/how-to/recipes.md is pasted into a new project, and keeps there what it promises.

``recipes/`` has the tests of each, named after its heading.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support import preloaded
from tests.support.commands import ROOT, completed

PAGE = ROOT / "docs/how-to/recipes.md"
RECIPES = dict(re.findall(r"^## (.+)\n([\s\S]*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE))
BLOCK = re.compile(r"^```python\n# ([\w/]+\.py)\n([\s\S]*?)^```$", re.MULTILINE)

SETTINGS = """
INSTALLED_APPS += ["shop", "django_rmq"]
RMQ = {"REDIS": "redis://localhost:6379/1", "TOPICS": {}, "TESTING": True}
"""


def run(folder: Path, *command: str) -> str:
    """Run Python in a project; return what it said."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    done = completed([*preloaded.python(), *command], seconds=300, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new project with an app, whose tables are made without migrations."""
    folder = tmp_path_factory.mktemp("template")
    run(folder, "-m", "django", "startproject", "mysite", ".")
    run(folder, "manage.py", "startapp", "shop")
    shutil.rmtree(folder / "shop/migrations")
    with (folder / "mysite/settings.py").open("a") as settings:
        settings.write(SETTINGS)
    return folder


def test_each_recipe_has_its_tests() -> None:
    named = {re.sub(r"\W+", "_", heading).lower() for heading in RECIPES}
    assert named == {path.stem for path in (ROOT / "tests/docs/recipes").glob("*.py")}


@pytest.mark.parametrize("heading", RECIPES)
def test_a_recipe_keeps_what_it_promises(tmp_path: Path, template: Path, heading: str) -> None:
    project = shutil.copytree(template, tmp_path / "project")
    for name, text in BLOCK.findall(RECIPES[heading]):
        path = project / ("mysite/settings.py" if name == "settings.py" else name)
        path.write_text((path.read_text() if name == "settings.py" else "") + text)
    tests = ROOT / "tests/docs/recipes" / f"{re.sub(r'[^a-z]+', '_', heading.lower())}.py"
    shutil.copy(tests, project / "shop/tests.py")
    said = run(project, "manage.py", "test", "shop")
    assert "identified no issues" in said
    assert re.search(r"^Ran [1-9]\d* tests? in .*\n\nOK$", said, re.MULTILINE), said


def test_a_recipe_is_about_twenty_lines() -> None:
    for heading, text in RECIPES.items():
        lines = [
            line for name, block in BLOCK.findall(text) if "models" not in name for line in block.splitlines()
        ]
        assert len([line for line in lines if line and not line.startswith(("from ", "import "))]) <= 24, (
            heading
        )
