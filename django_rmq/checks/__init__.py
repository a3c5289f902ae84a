"""System checks: they report mistakes in the settings and in the listeners before anything runs.

Servers are contacted only with ``check --deploy``. All checks have the tags ``django_rmq`` and ``rmq``.
``SILENCED_SYSTEM_CHECKS`` also accepts the ids of older versions, ``rmq.E001`` and so on.

=================  ==================================================================================
id                 what it says
=================  ==================================================================================
django_rmq.E001    the setting RMQ is missing, or it or a part of it is not a dict
django_rmq.E002    an unknown key
django_rmq.E003    a value of the wrong type or outside its range
django_rmq.E004    a topic name that is not allowed, or that no topic has
django_rmq.E005    a topic without TYPE has an option that only topics of one type have
django_rmq.E006    options of a topic that do not go together
django_rmq.E007    ZOOKEEPER is missing or incomplete
django_rmq.E008    a dotted path that cannot be imported, or that names another kind of object
django_rmq.E009    REDIS is missing or names no CACHES alias
django_rmq.E010    the CACHES alias is not one of django-redis
django_rmq.E011    the Redis database is also that of a cache, whose ``clear()`` is FLUSHDB
django_rmq.E012    a Redis URL that cannot be used
django_rmq.E013    RMQ["TESTING"] is True (with ``--deploy``)
django_rmq.E014    another project's package with the same import name is installed
django_rmq.W015    a broker in memory lacks fakeredis, on which it runs
django_rmq.E020    a module of listeners cannot be imported
django_rmq.E021    two listeners for one topic
django_rmq.E022    a function that cannot be a listener
django_rmq.E023    a listener for a topic that is not declared
django_rmq.E024    a listener for a topic that has LISTENER: False
django_rmq.E030    ZooKeeper does not answer (with ``--deploy``, like E031 and E032)
django_rmq.E031    ZooKeeper refuses the credentials, or its nodes belong to another user
django_rmq.E032    ZooKeeper holds something else at ROOT
django_rmq.E040    Redis does not answer (with ``--deploy``, like W041 to W046)
django_rmq.W041    Redis deletes messages when its memory is full. If DURABILITY is "strict", W041 to W044 are
                   errors, E041 to E044
django_rmq.W042    Redis keeps nothing on disk
django_rmq.W043    Redis is too old
django_rmq.W044    Redis refuses its user something that RMQ needs
django_rmq.E045    Redis refuses writes, because it is full, a replica, cannot store anything, or lacks replicas
django_rmq.W046    the memory of Redis is almost full, or its last snapshot failed
django_rmq.E060    a listener with once= for a topic without ORIGIN
django_rmq.E061    a listener with once= names a database that is not in DATABASES
django_rmq.E062    the database of a listener with once= has AUTOCOMMIT: False
django_rmq.E063    DATABASE_ROUTERS do not allow the table that once= needs
django_rmq.E064    messages of a listener with once= can be tried for longer than ONCE_RETENTION
django_rmq.W065    the migration that once= needs was not applied (with ``check --database``)
django_rmq.W066    sends of a listener with once= do not wait for its transaction
django_rmq.E070    a schedule of a topic that is not declared
django_rmq.E071    a schedule with a cron expression or a time zone that cannot be used
django_rmq.E072    options of a schedule that do not go together, or not with its topic
django_rmq.E073    a schedule with a cron expression, and cronsim is not installed
django_rmq.E074    two different schedules of one name
django_rmq.E085    a backend of TASKS, and neither Django nor an installed package has tasks
django_rmq.E086    a queue of TASKS that cannot be a topic, or whose topic is declared elsewhere
django_rmq.E087    the DATABASE of a backend of TASKS is not in DATABASES
django_rmq.E088    options of a queue that a backend of TASKS does not have
django_rmq.E089    a module in OPTIONS["MODULES"] of a backend of TASKS that cannot be imported
django_rmq.E095    HARD_TIMEOUT of a topic is not more than its MAX_RUNTIME
django_rmq.E100    BODY names a type, and pydantic is not installed
django_rmq.E101    BODY names a type that cannot be imported
django_rmq.E102    BODY names something that cannot be the type of a body
django_rmq.E103    UPCAST names a function that cannot be imported, or no function
django_rmq.E104    options of a topic that do not fit the type of its bodies
django_rmq.E105    a number of 1000 or more for TIME_RANGE or MAX_WAIT, which may be meant in milliseconds
django_rmq.E050    no database may have the outbox, because the routers forbid it
django_rmq.E051    the default database has no table for the outbox (with ``--deploy``)
django_rmq.W051    another database that may have the outbox has no table for it (with ``--deploy``)
django_rmq.I003    topics whose IDENTITY is "body", because it is not set (with ``--deploy``)
django_rmq.W001    a topic without a listener
django_rmq.W002    no topic is declared
=================  ==================================================================================

Here the checks are registered, those of ``--deploy`` with ``deploy=True``. ``system_checks`` has them, and is imported when the
first check runs: a web server runs none.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from django.core.checks import CheckMessage, Tags, register

TAGS = ("django_rmq", "rmq")
"""The tags of all checks: the app's label, and a short form."""


def _register(name: str, *tags: str, deploy: bool = False) -> Callable[..., list[CheckMessage]]:
    """Register the check ``name`` of ``system_checks``, and return it. The module is imported when the check runs."""

    def check(**kwargs: object) -> list[CheckMessage]:
        messages: list[CheckMessage] = getattr(import_module(f"{__name__}.system_checks"), name)(**kwargs)
        return messages

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
