"""The example shop's settings, and topics for what the shop itself has no use for."""

from __future__ import annotations

from typing import Any

from django_rmq.connections import SOCKET_TIMEOUTS
from example_project.settings import *  # noqa: F403
from example_project.settings import RMQ as SHOP_RMQ

# A busy machine can pause for a second. Redis is not unavailable then.
SOCKET_TIMEOUTS["web"] = 3.0

# The default takes a quarter of a second for each password.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

RMQ: dict[str, Any] = {  # type: ignore[no-redef]
    **SHOP_RMQ,
    "TOPICS": {
        **SHOP_RMQ["TOPICS"],  # type: ignore[dict-item]
        "notes": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": 1, "BODY": "text", "LISTENER": False},
        "letters": {"TYPE": "fixed_time", "SLOTS": 2, "IDENTITY": "key", "LISTENER": False},
        "views": {
            "TYPE": "priority",
            "SLOTS": 1,
            "BODY": "tests.support.typed_bodies.Viewed",
            "LISTENER": False,
        },
        "cards": {"TYPE": "priority", "SLOTS": 2, "LISTENER": False},
    },
    "ADMIN": {"PAGE_SIZE": 20, "COLUMNS": {"order-timeouts": ["order", "customer.city", "lines.0.sku"]}},
}
