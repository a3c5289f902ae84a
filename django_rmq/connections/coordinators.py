"""The coordinator that the settings name: how a worker makes it, how others read its workers and end the session of a dead
one, and the check that workers could use it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from django.utils.module_loading import import_string

from django_rmq.conf import Config, get_config
from django_rmq.connections.brokers import SOCKET_TIMEOUTS, current, get_broker, in_memory
from django_rmq.core.commands import membership
from django_rmq.core.coordination import Coordinator, Slots, StaticCoordinator, Worker
from django_rmq.core.coordination.redis_coordinator import RedisCoordinator
from django_rmq.exceptions import ConfigurationError

if TYPE_CHECKING:
    from django_rmq.core.coordination.zookeeper import Ensemble, ZooKeeperSurvey

SURVEY_SECONDS = 2.0
"""Maximum age in seconds of an answer of ZooKeeper that is shown to people."""

MakeCoordinator = Callable[[Worker, Callable[[Slots], None], Callable[[Slots], None], str], Coordinator]
"""Makes a coordinator from a worker, its ``own`` and ``disown``, and a token known only to its process and
its parent."""


def coordinator_maker() -> MakeCoordinator:
    """Return a function that makes the configured coordinator, once per process and after the last fork.

    Raises ``ConfigurationError`` if there is none.
    """
    name = get_config().coordinator
    if in_memory():
        # A broker in memory has the messages of one process, so this process owns every slot.
        return lambda worker, own, disown, token: StaticCoordinator(worker, own, disown)
    if name == "redis":
        # A worker calls this after its fork, so the broker that it gets has connections of the worker's own.
        return lambda worker, own, disown, token: RedisCoordinator(
            get_broker("coordinator"), worker, own, disown, token=token
        )
    if name == "zookeeper":
        return _through_zookeeper
    try:
        coordinator_class = import_string(name)
    except ImportError as error:
        raise ConfigurationError(f'RMQ["COORDINATOR"] is {name!r}: {error}') from error
    return lambda worker, own, disown, token: cast(
        "Coordinator", coordinator_class(get_broker("coordinator"), worker, own, disown)
    )


def _through_zookeeper(
    worker: Worker, own: Callable[[Slots], None], disown: Callable[[Slots], None], token: str
) -> Coordinator:
    # kazoo is an optional package, so it is imported only where ZooKeeper is the coordinator.
    from django_rmq.core.coordination.zookeeper import ZooKeeperCoordinator

    config, broker = get_config(), get_broker("coordinator")
    assert config.zookeeper is not None
    return ZooKeeperCoordinator(
        build_ensemble(config),
        worker,
        own,
        disown,
        registered=broker.definitions,
        token=token,
        is_strict=config.zookeeper.when_away == "stop",
    )


def build_ensemble(config: Config) -> Ensemble:
    """Return the addresses and credentials of ZooKeeper from the settings."""
    from django_rmq.core.coordination.zookeeper import Ensemble

    settings = config.zookeeper
    assert settings is not None
    return Ensemble(
        settings.hosts,
        settings.root,
        settings.session_timeout,
        settings.auth,
        is_closed=settings.acl == "creator",
        tls=settings.tls,
        key_prefix=config.key_prefix,
    )


def check_coordinator() -> None:
    """Check that workers could use the coordinator.

    Raises ``ConfigurationError`` if the coordinator cannot be made, or ROOT in ZooKeeper belongs to another
    application, and ``ServerTrouble`` if ZooKeeper does not answer or refuses the login.
    """
    coordinator_maker()
    if _coordinator() == "zookeeper":
        from django_rmq.core.coordination import zookeeper

        zookeeper.check(build_ensemble(get_config()))


def end_session(worker: str, token: str) -> None:
    """End a dead worker's session, so that others take over its slots at once. Raises ``ServerTrouble``.

    With a coordinator of the project's own, nothing is done: it has to notice the end of the process by itself.
    """
    if _coordinator() == "redis":
        get_broker("coordinator").run(membership.leave(worker, token))
    elif _coordinator() == "zookeeper":
        from django_rmq.core.coordination import zookeeper

        zookeeper.end_session(build_ensemble(get_config()), worker, token)


def survey_zookeeper() -> ZooKeeperSurvey | None:
    """Return the workers and the assignment from ZooKeeper, or None if another coordinator is in use. Raises ``ServerTrouble``.

    The answer may be ``SURVEY_SECONDS`` old, because it needs a session, and pages are loaded often.
    """
    if _coordinator() != "zookeeper":
        return None
    from django_rmq.core.coordination import zookeeper

    built = current()
    if built.survey is None or time.monotonic() >= built.survey[0]:
        members = zookeeper.survey(build_ensemble(get_config()), SOCKET_TIMEOUTS["web"])
        built.survey = time.monotonic() + SURVEY_SECONDS, members
    return built.survey[1]


def _coordinator() -> str:
    """Return the name of the coordinator in use, or an empty text with a broker in memory, which has none."""
    return "" if in_memory() else get_config().coordinator
