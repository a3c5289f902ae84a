"""Coordinators as the settings say, and whether workers could come together with them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from django.utils.module_loading import import_string

from django_rmq.core.calls import workers
from django_rmq.core.coordination import Coordinator, Slots, StaticCoordinator, Worker
from django_rmq.core.coordination.redis import RedisCoordinator
from django_rmq.exceptions import ConfigurationError
from django_rmq.project.connections.brokers import SOCKET_TIMEOUTS, current, get_broker, in_memory
from django_rmq.project.settings import Config, get_config

if TYPE_CHECKING:
    from django_rmq.core.coordination.zookeeper import Ensemble, Survey

SURVEY_SECONDS = 2.0
"""How old an answer of ZooKeeper may be that people look at."""

MakeCoordinator = Callable[[Worker, Callable[[Slots], None], Callable[[Slots], None], str], Coordinator]
"""From a worker, its ``own`` and ``disown``, and a token that only its own process and its parent know."""


def coordinator_maker() -> MakeCoordinator:
    """Return what makes the coordinator that the settings name, once per process and after the last fork.

    Raises ``ConfigurationError`` where there is none.
    """
    chosen = get_config().coordinator
    if in_memory():
        return lambda worker, own, disown, token: StaticCoordinator(worker, own, disown)
    if chosen == "redis":
        return lambda worker, own, disown, token: RedisCoordinator(
            get_broker("coordinator"), worker, own, disown, token=token
        )
    if chosen == "zookeeper":
        return _through_zookeeper
    try:
        found = import_string(chosen)
    except ImportError as error:
        raise ConfigurationError(f'RMQ["COORDINATOR"] is {chosen!r}: {error}') from error
    return lambda worker, own, disown, token: cast(
        "Coordinator", found(get_broker("coordinator"), worker, own, disown)
    )


def _through_zookeeper(
    worker: Worker, own: Callable[[Slots], None], disown: Callable[[Slots], None], token: str
) -> Coordinator:
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
    """Return what the settings say of ZooKeeper, for those who connect to it."""
    from django_rmq.core.coordination.zookeeper import Ensemble

    given = config.zookeeper
    assert given is not None
    return Ensemble(
        given.hosts,
        given.root,
        given.session_timeout,
        given.auth,
        is_closed=given.acl == "creator",
        tls=given.tls,
        key_prefix=config.key_prefix,
    )


def check_coordinator() -> None:
    """Make sure that workers could come together.

    Raises ``ConfigurationError`` where the coordinator cannot be made, or ZooKeeper holds something else at ROOT, and
    ``ServerTrouble`` where ZooKeeper does not answer or refuses us.
    """
    coordinator_maker()
    if _coordinator() == "zookeeper":
        from django_rmq.core.coordination import zookeeper

        zookeeper.check(build_ensemble(get_config()))


def end_session(worker: str, token: str) -> None:
    """Let others take over at once what a dead worker owned. Raises ``ServerTrouble``."""
    if _coordinator() == "redis":
        get_broker("coordinator").run(workers.leave(worker, token))
    elif _coordinator() == "zookeeper":
        from django_rmq.core.coordination import zookeeper

        zookeeper.end_session(build_ensemble(get_config()), worker, token)


def survey_zookeeper() -> Survey | None:
    """Return who comes together in ZooKeeper and who owns what; None where Redis' roster tells. Raises ``ServerTrouble``.

    The answer may be ``SURVEY_SECONDS`` old: it takes a session, and pages are looked at again and again.
    """
    if _coordinator() != "zookeeper":
        return None
    from django_rmq.core.coordination import zookeeper

    built = current()
    if built.survey is None or time.monotonic() >= built.survey[0]:
        found = zookeeper.survey(build_ensemble(get_config()), SOCKET_TIMEOUTS["web"])
        built.survey = time.monotonic() + SURVEY_SECONDS, found
    return built.survey[1]


def _coordinator() -> str:
    """Return which coordinator is in use: with a broker in memory there is none to ask."""
    return "" if in_memory() else get_config().coordinator
