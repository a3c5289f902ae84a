"""The registry of pipelines: those of the package, and those that apps define in a module ``pipelines``."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from argparse import ArgumentParser
from importlib import import_module
from typing import Any, ClassVar, TypeVar

from django.apps import apps
from django.utils.module_loading import module_has_submodule

from django_rmq.exceptions import ConfigurationError
from django_rmq.spark.pipelines.pipeline_context import Context

MODULE = "pipelines"
"""The name of the modules in which apps define their pipelines."""

BUILT_IN = ("archive", "consume", "ingest", "topic_reports")
"""The modules of the built-in pipelines."""

Options = dict[str, Any]
"""The arguments of a pipeline as argparse has read them."""


class Pipeline(ABC):
    """A Spark job. The first line of its docstring is shown in lists, all of it as help."""

    name: ClassVar[str]

    def add_arguments(self, parser: ArgumentParser) -> None:  # noqa: B027 - a pipeline may have none
        """Add arguments to those of all pipelines. ``type="duration"`` reads seconds from 90, 15m or 7d."""

    @abstractmethod
    def run(self, context: Context, **options: object) -> None:
        """Run the pipeline; ``options`` are its own arguments.

        Raises ``RmqError``, or errors of Spark.
        """


Class = TypeVar("Class", bound=type[Pipeline])

_pipelines: dict[str, type[Pipeline]] = {}


def register(pipeline: Class) -> Class:
    """Register a class for ``runrmqpipeline``; a decorator. Raises ``ConfigurationError`` for a name that is taken."""
    name: object = getattr(pipeline, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"pipeline {pipeline.__qualname__} has no name")
    other = _pipelines.get(name)
    if other is not None and _place(other) != _place(pipeline):
        raise ConfigurationError(
            f'two pipelines have the name "{name}": {_place(other)} and {_place(pipeline)}'
        )
    _pipelines[name] = pipeline
    return pipeline


def pipelines() -> dict[str, type[Pipeline]]:
    """Return all pipelines by name: the built-in ones, and those of the installed apps.

    Raises ``ConfigurationError`` for a module of an app that cannot be imported.
    """
    for module in BUILT_IN:
        import_module(f"{__package__}.{module}")
    for app in apps.get_app_configs():
        if app.module is None or app.name == "django_rmq" or not module_has_submodule(app.module, MODULE):
            continue
        module = f"{app.name}.{MODULE}"
        try:
            import_module(module)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(f"{module} cannot be imported: {error}") from error
    return dict(sorted(_pipelines.items()))


def summary(pipeline: type[Pipeline]) -> str:
    """Return the description of a pipeline in one line."""
    return (inspect.getdoc(pipeline) or "").partition("\n")[0]


def _place(pipeline: type[Pipeline]) -> str:
    return f"{pipeline.__module__}.{pipeline.__qualname__}"
