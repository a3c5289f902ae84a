"""The connections of this process to Redis: brokers and producers, and the check of topic definitions.

``connections.coordinators`` makes coordinators, which only workers, checks and the pages of people need.
"""

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
    get_shared_connection,
    in_memory,
    is_agreed,
    refresh_definitions,
    replaced_broker,
    server_flaws,
    slots_now,
    unreadable,
    with_former_slots,
    with_present_slots,
)

__all__ = [
    "SOCKET_TIMEOUTS",
    "Purpose",
    "agree",
    "begin_test",
    "close",
    "events",
    "forget",
    "get_broker",
    "get_producer",
    "get_shared_connection",
    "in_memory",
    "is_agreed",
    "refresh_definitions",
    "replaced_broker",
    "server_flaws",
    "slots_now",
    "unreadable",
    "with_former_slots",
    "with_present_slots",
]
