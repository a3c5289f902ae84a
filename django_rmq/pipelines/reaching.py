"""The connection options with which Spark's tasks reach the Redis of the settings."""

from __future__ import annotations

import json

from django_rmq.core.words import addresses
from django_rmq.exceptions import ConfigurationError
from django_rmq.project.settings import get_config


def connection_options() -> dict[str, str]:
    """Return the connection to the Redis of the settings, as options of ``format("rmq")``.

    Raises ``ConfigurationError`` for settings that cannot be passed to tasks: a broker in memory, sentinels,
    or options of connections that are not JSON.
    """
    config = get_config()
    if config.broker == "memory" or config.redis is None:
        raise ConfigurationError(
            'Spark needs Redis, but RMQ["BROKER"] is "memory", which other processes cannot use'
        )
    server = config.redis
    if server.sentinels:
        raise ConfigurationError(
            "Spark cannot use sentinels: give it an address that always leads to the primary, in a settings module for pipelines"
        )
    told: dict[str, object] = {**server.pool}
    told |= {name: getattr(server, name) for name in addresses.LOGIN if getattr(server, name)}
    urls = []
    for url in server.cluster or (server.url,):
        address = addresses.without_login(url)
        urls.append(address.url)
        told |= address.options
    found = {"prefix": config.key_prefix, "url": ",".join(urls)}
    found |= {name: str(told.pop(name)) for name in addresses.LOGIN if told.get(name)}
    if server.cluster:
        found["cluster"] = "true"
    if told:
        # Spark hides the values of options with certain names, and it is unknown which of these options are
        # secret.
        try:
            found["secretConnectionOptions"] = json.dumps(told)
        except TypeError as error:
            raise ConfigurationError(
                f"CONNECTION_POOL_KWARGS cannot be passed to Spark's tasks: {error}"
            ) from None
    return found
