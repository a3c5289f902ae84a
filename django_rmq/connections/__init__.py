"""The connections of this process to Redis: brokers, producers and coordinators, and the check of topic definitions."""

from django_rmq.connections.brokers import (
    SOCKET_TIMEOUTS,
    Purpose,
    agree,
    begin_test,
    close,
    events,
    forget,
    get_broker,
    get_producer,
    in_memory,
    is_agreed,
    present,
    replaced_broker,
    server_flaws,
    slots_now,
    unreadable,
)
from django_rmq.connections.coordinators import (
    check_coordinator,
    coordinator_maker,
    end_session,
    survey_zookeeper,
)

__all__ = [
    "SOCKET_TIMEOUTS",
    "Purpose",
    "agree",
    "begin_test",
    "check_coordinator",
    "close",
    "coordinator_maker",
    "end_session",
    "events",
    "forget",
    "get_broker",
    "get_producer",
    "in_memory",
    "is_agreed",
    "present",
    "replaced_broker",
    "server_flaws",
    "slots_now",
    "survey_zookeeper",
    "unreadable",
]
