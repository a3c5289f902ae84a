"""Redis URLs: which parts may be printed, and how the login is separated from the address.

A URL is parsed, never searched for text that looks like a password. Printed text consists only of the parts that cannot be
secret. Whether redis-py accepts a URL is not decided here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit, urlunsplit

SCHEMES = ("redis", "rediss", "unix")

LOGIN = ("username", "password")
"""Connection options that identify the user, in the order in which a URL names them."""

_TYPED = frozenset(
    {
        "db",
        "health_check_interval",
        "max_connections",
        "retry_on_error",
        "retry_on_timeout",
        "socket_connect_timeout",
        "socket_keepalive",
        "socket_timeout",
        "ssl_check_hostname",
        "timeout",
    }
)
"""Parameters of a URL that redis-py reads as numbers and flags. All others are text, and may be secret."""

_MAY_HOLD_AT = frozenset({*LOGIN, "ssl_password"})
_HOST = re.compile(r"[\w.-]+")
_IPV6 = re.compile(r"[0-9a-fA-F:.]+(%\w+)?", re.ASCII)
_NEXT_URL = re.compile(rf"\s*[,;]\s*(?=(?:{'|'.join(SCHEMES)})://)")


class UnreadableAddress(ValueError):
    """A URL whose parts cannot be separated. The error's text contains none of the URL."""


def parse(url: str) -> SplitResult:
    """Return the parts of a URL. Raises ``UnreadableAddress`` if a login could be mistaken for something else."""
    try:
        parts = urlsplit(url)
        # ``urlsplit`` raises nothing for a port that is no number, before the port is asked for.
        _ = parts.port
    except ValueError:
        # The original error quotes the text that it could not read.
        raise UnreadableAddress("the URL cannot be read") from None
    # A slash, a question mark or a number sign in a password ends the part of the URL that holds the login.
    behind = [parts.path, parts.fragment]
    for parameter in parts.query.split("&"):
        name, _, value = parameter.partition("=")
        behind += [name] if name in _MAY_HOLD_AT else [name, value]
    if any("@" in part for part in behind):
        raise UnreadableAddress("the URL cannot be read: user name and password must come before the host")
    return parts


def database(parts: SplitResult) -> str | None:
    """Return the database that a URL names in its query or its path, or None if it names none."""
    # As in redis-py, the first of several parameters of one name counts, and the query takes precedence over the
    # path.
    number = dict(reversed(parse_qsl(parts.query))).get("db")
    if number:
        return number
    return None if parts.scheme == "unix" else (parts.path.strip("/") or None)


def printable_url(url: str) -> str:
    """Return the printable parts of a URL: its scheme, host, port and database; of a Unix socket, the path and the database.

    If the URL cannot be read, only its scheme is known to be harmless. If its scheme does not belong to Redis, nothing is.
    """
    scheme = url.partition("://")[0].strip().lower()
    if scheme not in SCHEMES:
        return "..."
    try:
        parts = parse(url)
    except UnreadableAddress:
        return f"{scheme}://..."
    number = database(parts) or ""
    # The path may be the end of a password with a slash in it.
    number = number if number.isdecimal() and number.isascii() else ""
    if parts.scheme == "unix":
        return f"unix://{unquote(parts.path)}{f'?db={number}' if number else ''}"
    host = parts.hostname or ""
    if _IPV6.fullmatch(host) and ":" in host:
        host = f"[{host}]"
    elif not _HOST.fullmatch(host):
        return f"{scheme}://..."
    port = "" if parts.port is None else f":{parts.port}"
    return f"{scheme}://{host}{port}{f'/{number}' if number else ''}"


def several(text: str) -> list[str]:
    """Return the URLs of a list separated by commas or semicolons. A password may contain either."""
    return [url for url in _NEXT_URL.split(text.strip()) if url]


class Address(NamedTuple):
    """A URL without its login, and the options that were taken out of it."""

    url: str
    options: dict[str, str]
    """Options of connections: the login, and other text of the query."""


def without_login(url: str) -> Address:
    """Return the URL with host, port, database, numbers and flags, and separately everything that may be secret.

    As in redis-py, the login before the host takes precedence over the one in the query. Raises
    ``UnreadableAddress``.
    """
    parts = parse(url)
    query = dict(reversed(parse_qsl(parts.query)))
    options = {name: value for name, value in query.items() if name not in _TYPED}
    for name in LOGIN:
        value = getattr(parts, name)
        if value:
            options[name] = unquote(value)
    options_text = urlencode({name: value for name, value in query.items() if name in _TYPED})
    host = parts.netloc.rpartition("@")[2]
    return Address(urlunsplit((parts.scheme, host, parts.path, options_text, "")), options)


def unusable(where: str, names: Iterable[str], error: Exception) -> str:
    """Return a sentence about connection options that redis-py refuses; it contains only their names.

    The text of ``error`` may contain their values.
    """
    text = str(error)
    blamed = sorted(name for name in names if f"'{name}'" in text)
    about = f" (see {', '.join(blamed)})" if blamed else ""
    return f"the options for Redis at {where} cannot be used{about}: redis-py answers {type(error).__name__}"
