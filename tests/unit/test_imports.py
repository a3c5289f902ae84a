"""What an import loads: Spark executors and plain scripts use the core without Django."""

from __future__ import annotations

import subprocess
import sys

import pytest

import django_rmq

WITHOUT_DJANGO = [
    "django_rmq",
    "django_rmq.exceptions",
    "django_rmq.core.words.messages",
    "django_rmq.core.words.keys",
    "django_rmq.core.scripts",
    "django_rmq.core.redis.broker",
    "django_rmq.core.producer.sending",
    "django_rmq.core.consumer",
    "django_rmq.core.coordination",
    "django_rmq.testing",
]


def modules_loaded_by(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter has after the statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(answer.stdout.split())


def test_loading_django_would_be_seen() -> None:
    assert "django" in modules_loaded_by("from django.conf import settings")


@pytest.mark.parametrize("module", WITHOUT_DJANGO)
def test_the_core_is_imported_without_django(module: str) -> None:
    loaded = modules_loaded_by(f"import {module}")
    assert "django_rmq" in loaded
    assert loaded.isdisjoint({"django", "django_redis", "rest_framework", "kazoo", "pyspark"})


def test_importing_the_root_package_loads_no_driver() -> None:
    assert modules_loaded_by("import django_rmq").isdisjoint({"redis", "hiredis", "kazoo"})


def test_no_process_but_that_of_its_command_imports_pipelines_or_spark() -> None:
    code = (
        "import os, django, sys; os.environ['DJANGO_SETTINGS_MODULE'] = 'example_project.settings'; django.setup();"
        "from django.urls import get_resolver; get_resolver().url_patterns;"
        "from django_rmq.project.listening import registry; registry.autodiscover();"
        "import django_rmq.management.commands.runrmqconsumers;"
        "print([name for name in sys.modules if name.startswith(('django_rmq.pipelines', 'django_rmq.spark', 'pyspark'))])"
    )
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "[]"


def test_the_worker_is_imported_without_models() -> None:
    assert "django" in modules_loaded_by("import django_rmq.project.listening.processes")


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
    ran = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    told = ran.stderr.strip().splitlines()[-1]
    assert told.startswith("ModuleNotFoundError: django_rmq.metrics needs prometheus-client")
    assert 'extra "prometheus"' in told
