"""What an import loads: Spark executors and plain scripts use the core without Django; the root package has lazy names."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import django_rmq
from django_rmq import exceptions
from tests.support.commands import completed, printed_by

WITHOUT_DJANGO = [
    "django_rmq", "django_rmq.exceptions", "django_rmq.core.model.delivered_message",
    "django_rmq.core.model.keys", "django_rmq.core.lua", "django_rmq.core.redis.broker",
    "django_rmq.core.producer.producer", "django_rmq.core.consumer", "django_rmq.core.coordination",
    "django_rmq.testing",
]  # fmt: skip


def modules_loaded_by(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter has after the statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    return set(printed_by(code).split())


def test_loading_django_would_be_seen() -> None:
    assert "django" in modules_loaded_by("from django.conf import settings")


def test_the_core_is_imported_without_django() -> None:
    loaded = modules_loaded_by(f"import {', '.join(WITHOUT_DJANGO)}")
    assert "django_rmq" in loaded
    assert loaded.isdisjoint({"django", "django_redis", "rest_framework", "kazoo", "pyspark"})


def test_importing_the_root_package_loads_no_driver() -> None:
    assert modules_loaded_by("import django_rmq").isdisjoint({"redis", "hiredis", "kazoo"})


def test_no_process_but_that_of_its_command_imports_pipelines_or_spark() -> None:
    code = (
        "import os, django, sys; os.environ['DJANGO_SETTINGS_MODULE'] = 'example_project.settings'; django.setup();"
        "from django.urls import get_resolver; get_resolver().url_patterns;"
        "from django_rmq.worker import listener_registry as registry; registry.autodiscover();"
        "import django_rmq.management.commands.runrmqconsumers;"
        "print([name for name in sys.modules if name.startswith(('django_rmq.spark', 'pyspark'))])"
    )
    assert printed_by(code) == "[]"


@pytest.mark.parametrize(
    ("used", "most"), [("pass", 40), ("from django_rmq import send_message", 75)], ids=["set up", "sends"]
)
def test_a_web_process_loads_few_modules(used: str, most: int) -> None:
    # A web server runs no check and no worker: what it does not use is not imported.
    loaded = modules_of_a_small_project(used)
    assert "django_rmq.apps" in loaded
    assert len(loaded) <= most, sorted(loaded)
    unused = ("django_rmq.core.consumer", "django_rmq.core.cluster", "django_rmq.worker")
    assert not [name for name in loaded if name.startswith(unused)]


def test_the_command_of_a_worker_leaves_out_what_admin_and_rest_do() -> None:
    # Its parent and all its children would hold it in memory.
    loaded = modules_of_a_small_project("import django_rmq.management.commands.runrmqconsumers")
    assert "django_rmq.worker.worker_process" in loaded
    assert not [name for name in loaded if name.startswith("django_rmq.operations")]


def modules_of_a_small_project(statement: str) -> list[str]:
    """Return the modules of the package that a process of a project has after its start and the statement."""
    code = f"""
import sys, django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "django_rmq"],
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}},
    RMQ={{"REDIS": "redis://127.0.0.1:1", "TOPICS": {{"orders": {{}}}}}},
)
django.setup()
{statement}
print(*(name for name in sys.modules if name.partition(".")[0] == "django_rmq"))
"""
    return printed_by(code).split()


def test_the_worker_is_imported_without_models() -> None:
    assert "django" in modules_loaded_by("import django_rmq.worker.worker_process")


@pytest.mark.parametrize("name", django_rmq.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(django_rmq, name) is not None
    assert name in dir(django_rmq)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        django_rmq.no_such_name  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("module", ["django_rmq.metrics", "django_rmq.metrics.urls"])
def test_the_metrics_name_the_extra_that_they_lack(module: str) -> None:
    code = f"import sys; sys.modules['prometheus_client'] = None; import {module}"
    told = completed([sys.executable, "-c", code]).stderr.strip().splitlines()[-1]
    assert told.startswith("ModuleNotFoundError: django_rmq.metrics needs prometheus-client")
    assert 'pip install "django-redis-rmq[prometheus]"' in told


IMPORTERS = {
    "__import__", "autodiscover_modules", "eval", "exec", "exec_module", "find_spec", "import_by_path", "import_module",
    "import_string", "load_module", "locate", "resolve_name", "run_module", "run_path", "spec_from_file_location",
    "module_from_spec", "walk_packages",
}  # fmt: skip
LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "runpy", "pydoc"}
THE_SETTINGS = "the path is in the project's settings"
THE_PROJECT = "the name is that of an installed app, or in the project's settings"
OURS = "the name is a constant of this package"
ALLOWED = {
    "__init__.py": {"import_module": OURS},
    "operations/authorization.py": {"import_string": THE_SETTINGS},
    "api/schema.py": {"find_spec": OURS},
    "api/urls.py": {"find_spec": OURS},
    "checks/__init__.py": {"import_module": OURS},
    "checks/system_checks.py": {
        "import_string": THE_SETTINGS,
        "locate": "a file of a distribution, and no import",
    },
    "core/consumer/async_executor.py": {"import_module": OURS},
    "core/redis/in_memory.py": {"eval": "a script of ours, for tests", "find_spec": OURS},
    "management/commands/rmqstats.py": {"find_spec": OURS},
    "operations/message_view.py": {"import_string": THE_SETTINGS},
    "spark/pipelines/pipeline.py": {"import_module": THE_PROJECT},
    "spark/pipelines/consume.py": {"import_string": "the command line names it"},
    "connections/coordinators.py": {"import_string": THE_SETTINGS},
    "schedules.py": {"find_spec": OURS},
    "conf/server_settings.py": {"import_string": THE_SETTINGS},
    "conf/topic_settings.py": {"import_string": THE_SETTINGS},
    "conf/parsers.py": {"find_spec": OURS},
    "tasks/__init__.py": {"find_spec": OURS, "import_module": OURS},
    "tasks/task_modules.py": {"import_module": THE_PROJECT},
    "typed_bodies.py": {"import_string": THE_SETTINGS},
    "spark/broker_connection.py": {"import_module": "an option of the Spark job names it"},
    "spark/java.py": {"find_spec": OURS},
}
"""File -> what it uses to import by a name -> where the name comes from. It never comes from Redis."""


def importing(source: str) -> set[str]:
    """Return the names used in ``source`` that import by a name, or that run what is stored."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [*(alias.name for alias in node.names), getattr(node, "module", None) or ""]
            found |= {name for name in names if name.partition(".")[0] in LOADERS}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found |= {node.id} & IMPORTERS
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & IMPORTERS
    return found


def test_a_name_that_leads_to_an_import_would_be_seen() -> None:
    assert importing("import pickle\nimport_string(path)\nimportlib.import_module(name)") == {
        "pickle",
        "import_string",
        "import_module",
    }


def test_every_import_by_a_name_has_a_reason_and_none_is_of_a_name_from_redis() -> None:
    root = Path(django_rmq.__file__).parent
    used = {
        path.relative_to(root).as_posix(): names
        for path in sorted(root.rglob("*.py"))
        if (names := importing(path.read_text()))
    }
    assert used == {path: set(reasons) for path, reasons in ALLOWED.items()}


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
