"""The example project with a web server and no workers, for programs that talk to its REST API."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support import preloaded
from tests.support.commands import ROOT, completed, output_of, started
from tests.support.embedded_server import free_port
from tests.support.servers import absent
from tests.support.workers import eventually

TOPIC = "image-renders"
DEVELOPMENT = ("manage.py", "runserver", "--noreload", "127.0.0.1:{port}")


class Shop:
    """The example project with a web server and no workers."""

    def __init__(self, environment: dict[str, str], port: int) -> None:
        self.environment = environment
        self.url = f"http://127.0.0.1:{port}/api/rmq"
        self.token = ""

    def manage(self, *command: str) -> str:
        return output_of([*preloaded.python(), "manage.py", *command], self.environment)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"{self.url}/{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Token {self.token}", "Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def is_up(self) -> bool:
        with suppress(urllib.error.URLError):
            return self.ask("GET", "health/live")["ok"] is True
        return False

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "RMQ_URL": self.url, "RMQ_TOKEN": self.token}
        return completed(command, seconds=120, cwd=ROOT / "examples", env=environment)

    def send(self, *bodies: Any) -> None:
        messages = [{"body": {"shop": 1, **body}, "priority": 100 - n} for n, body in enumerate(bodies)]
        self.ask("POST", f"topics/{TOPIC}/messages/", {"messages": messages})


@contextmanager
def running(
    redis_url: str, folder: Path, program: tuple[str, ...] = DEVELOPMENT, **topic: Any
) -> Iterator[Shop]:
    """Serve the shop, with its data in a folder, keys of its own, and other settings of the topic.

    `program`: what Python runs; `{port}` stands for the port.
    """
    (folder / "shop_settings.py").write_text(
        f"from example_project.settings import *\nRMQ['TOPICS'][{TOPIC!r}] |= {topic!r}\n"
    )
    port = free_port()
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "shop_settings",
        "PYTHONPATH": f"{ROOT}:{folder}",
        "REDIS_URL": redis_url,
        "RMQ_KEY_PREFIX": f"t{uuid.uuid4().hex[:12]}:",
        "SHOP_DATA": str(folder),
        "DJANGO_SUPERUSER_PASSWORD": "program",
    }
    shop = Shop(environment, port)
    shop.manage("migrate", "--verbosity", "0")
    shop.manage("createsuperuser", "--noinput", "--username", "program", "--email", "program@example.com")
    shop.token = shop.manage("drf_create_token", "program").split()[2]
    command = [*preloaded.python(), *(each.format(port=port) for each in program)]
    server = started(command, Path(os.devnull), environment)
    try:
        eventually(shop.is_up, "the web server", 60)
        yield shop
    finally:
        server.terminate()
        server.wait(30)


def installed(name: str, package: str) -> str:
    """Return the path of a program that CI must have."""
    found = shutil.which(name)
    if found is None:
        absent(f"{package} is not installed")
    return found
