"""A WSGI server as large sites run it: processes that share a socket, each with a fixed number of threads.

    python -m tests.support.prefork PORT PROCESSES THREADS

Serves the application of DJANGO_SETTINGS_MODULE on loopback until SIGTERM. A request that finds no free thread waits.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from django.core.wsgi import get_wsgi_application


class Quiet(WSGIRequestHandler):
    """Writes no line for each request."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


def serve(listening: socket.socket, threads: int) -> None:
    """Answer requests in so many threads, for ever."""
    application = get_wsgi_application()
    server = WSGIServer(listening.getsockname(), Quiet, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    server.server_name, server.server_port = listening.getsockname()
    server.setup_environ()

    def with_threads(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        # wsgiref itself says that there is one.
        return application({**environ, "wsgi.multithread": True}, start_response)

    server.set_app(with_threads)

    def work() -> None:
        while True:
            with suppress(OSError):
                server.process_request(*server.get_request())

    for _ in range(threads - 1):
        threading.Thread(target=work, daemon=True).start()
    work()


def main(port: int, processes: int, threads: int) -> None:
    """Fork the processes, and end with them."""
    listening = socket.create_server(("127.0.0.1", port), backlog=256)
    children = []
    for _ in range(processes):
        child = os.fork()
        if child == 0:
            serve(listening, threads)
        children.append(child)
    listening.close()

    def end(*_: object) -> None:
        for child in children:
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
