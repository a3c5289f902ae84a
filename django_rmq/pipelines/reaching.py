"""The connection options with which Spark's tasks reach the Redis of the settings."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from django_rmq.core.words import addresses
from django_rmq.exceptions import ConfigurationError
from django_rmq.project.settings import get_config


def connection_options() -> dict[str, str]:
    """Return the connection to the Redis of the settings, as options of ``format("rmq")``.

    Raises ``ConfigurationError`` for settings that cannot be passed to tasks: a broker in memory, or options of
    connections that are not JSON. A credential provider is an object of this process; tasks make their own.
    """
    config = get_config()
    if config.broker == "memory" or config.redis is None:
        raise ConfigurationError(
            'Spark needs Redis, but RMQ["BROKER"] is "memory", which other processes cannot use'
        )
    server = config.redis
    told: dict[str, object] = {**server.pool}
    provider = os.environ.get("RMQ_CREDENTIAL_PROVIDER")
    if told.pop("credential_provider", None) is not None and not provider:
        raise ConfigurationError(
            "CONNECTION_POOL_KWARGS has a credential_provider, an object that cannot be passed to Spark's tasks: set "
            "RMQ_CREDENTIAL_PROVIDER to the dotted path of a function or class without arguments that makes one"
        )
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
    if provider:
        found["credentialProvider"] = provider
    if server.sentinels:
        found["sentinels"] = ",".join(f"{host}:{port}" for host, port in server.sentinels)
    # Spark hides the values of options with certain names, and it is unknown which of these options are
    # secret.
    found |= _secret("secretConnectionOptions", "CONNECTION_POOL_KWARGS", told)
    return found | _secret("secretSentinelOptions", "SENTINEL_KWARGS", server.sentinel_options)


def _secret(option: str, setting: str, values: Mapping[str, object]) -> dict[str, str]:
    if not values:
        return {}
    try:
        return {option: json.dumps(dict(values))}
    except TypeError as error:
        raise ConfigurationError(f"{setting} cannot be passed to Spark's tasks: {error}") from None
