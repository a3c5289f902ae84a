"""Answers ``GET /live`` and ``GET /ready`` inside an existing select loop, without a thread that a fork could break."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from django_rmq.exceptions import ConfigurationError

_MOST, _SECONDS, _BYTES = 64, 5.0, 8192
"""The maximum number of connections at once, seconds until a request is complete, and bytes of a request."""


class HealthServer:
    """A minimal HTTP server.

    ``address`` is ``host:port``; ``answer`` returns the state for ``live`` or ``ready``, and details.

    Raises ``ConfigurationError`` if the address cannot be used. Call ``serve`` when one of the sockets in
    ``selector`` can be read, and from time to time.
    """

    def __init__(self, address: str, answer: Callable[[str], tuple[bool, dict[str, Any]]]) -> None:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        self._answer = answer
        self._asking: dict[socket.socket, tuple[float, bytes]] = {}
        self._selector: selectors.BaseSelector | None = None
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listening = socket.create_server((host, int(port)), family=family)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigurationError(f"cannot serve health checks at {address}: {error}") from error
        self._listening.setblocking(False)

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._listening.getsockname()[1])

    def join(self, selector: selectors.BaseSelector) -> None:
        """Register with ``selector``."""
        self._selector = selector
        selector.register(self._listening, selectors.EVENT_READ)

    def close(self) -> None:
        """Close every socket. In a forked child this closes only the child's copies."""
        for connection in [*self._asking, self._listening]:
            connection.close()
        self._asking.clear()

    def serve(self) -> None:
        """Accept, read and answer what can be handled without waiting."""
        assert self._selector is not None
        with contextlib.suppress(BlockingIOError, OSError):
            while True:
                connection, _ = self._listening.accept()
                if len(self._asking) >= _MOST:
                    self._end(next(iter(self._asking)))
                connection.setblocking(False)
                self._asking[connection] = (time.monotonic() + _SECONDS, b"")
                self._selector.register(connection, selectors.EVENT_READ)
        for connection, (until, said) in list(self._asking.items()):
            try:
                more = connection.recv(_BYTES)
            except BlockingIOError:
                if time.monotonic() > until:
                    self._end(connection)
                continue
            except OSError:
                self._end(connection)
                continue
            said += more
            if b"\r\n\r\n" in said or b"\n\n" in said:
                with contextlib.suppress(OSError):
                    connection.send(self._reply(said))
                self._end(connection)
            elif not more or len(said) > _BYTES:
                self._end(connection)
            else:
                self._asking[connection] = (until, said)

    def _end(self, connection: socket.socket) -> None:
        del self._asking[connection]
        assert self._selector is not None
        self._selector.unregister(connection)
        connection.close()

    def _reply(self, said: bytes) -> bytes:
        method, _, rest = said.partition(b" ")
        path = rest.split(b" ", 1)[0].split(b"?", 1)[0].strip(b"/").decode("latin-1")
        body: dict[str, Any]
        if method not in (b"GET", b"HEAD"):
            status, body = "405 Method Not Allowed", {"error": "GET only"}
        elif path not in ("live", "ready"):
            status, body = "404 Not Found", {"error": "use /live or /ready"}
        else:
            is_so, more = self._answer(path)
            status, body = "200 OK" if is_so else "503 Service Unavailable", {path: is_so, **more}
        text = json.dumps(body).encode() + b"\n"
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
            "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (text if method != b"HEAD" else b"")
