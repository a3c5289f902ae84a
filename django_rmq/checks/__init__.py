"""System checks: they report mistakes in the settings and in the listeners before anything runs.

Servers are contacted only with ``check --deploy``. All checks have the tags ``django_rmq`` and ``rmq``.

``docs/reference/checks.md`` lists what each id says, and what to do.

Here the checks are registered, those of ``--deploy`` with ``deploy=True``. ``system_checks`` has them, and is imported when the
first check runs: a web server runs none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from django.core.checks import CheckMessage, Tags, register

TAGS = ("django_rmq", "rmq")
"""The tags of all checks: the app's label, and a short form."""


def _register(name: str, *tags: str, deploy: bool = False) -> Callable[..., list[CheckMessage]]:
    """Register the check ``name`` of ``system_checks``, and return it. The module is imported when the check runs."""

    def check(databases: Sequence[str] | None = None, **_: object) -> list[CheckMessage]:
        messages = getattr(import_module(f"{__name__}.system_checks"), name)
        return [*(messages(databases) if Tags.database in tags else messages())]

    check.__name__ = check.__qualname__ = name
    register(check, *TAGS, *tags, deploy=deploy)
    return check


check_bodies = _register("check_bodies")
check_broker_in_memory = _register("check_broker_in_memory")
check_identity = _register("check_identity", deploy=True)
check_listeners = _register("check_listeners")
check_outbox = _register("check_outbox")
check_outbox_tables = _register("check_outbox_tables", deploy=True)
check_package = _register("check_package")
check_redis = _register("check_redis", deploy=True)
check_schedules = _register("check_schedules")
check_settings = _register("check_settings")
check_tables = _register("check_tables", Tags.database)
check_tasks = _register("check_tasks")
check_testing = _register("check_testing", deploy=True)
check_zookeeper = _register("check_zookeeper", deploy=True)
