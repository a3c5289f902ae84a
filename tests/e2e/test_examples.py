"""The consumers in other languages that `examples/` shows, against the example project as a server of its own."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

import pytest

from tests.e2e.test_python_consumer import PYTHON
from tests.support.servers import serving
from tests.support.shop_server import TOPIC, Shop, installed, running


@pytest.fixture(scope="module")
def shop(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with running(redis_url, tmp_path_factory.mktemp("shop")) as found:
        yield found


@pytest.fixture
def node() -> str:
    return installed("node", "Node")


@pytest.fixture
def curl() -> str:
    return installed("curl", "curl")


def check_empty(shop: Shop, dead: int = 0) -> None:
    found = shop.ask("GET", f"topics/{TOPIC}/")
    assert (found["waiting"], found["running"], found["dead"]) == (0, 0, dead)


def test_the_shell_script_consumes(shop: Shop, curl: str) -> None:
    shop.send({"n": 1, "id": "in a body"}, {"n": 2}, {"text": 'quotes " and, commas'})
    ran = shop.run("sh", "consume.sh", TOPIC, "3")
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert lines == [
        {"id": "in a body", "n": 1, "shop": 1},
        {"n": 2, "shop": 1},
        {"shop": 1, "text": 'quotes " and, commas'},
    ]
    check_empty(shop)


def test_the_shell_script_lets_what_fails_be_tried_again(shop: Shop, curl: str) -> None:
    shop.send({"n": 3})
    ran = shop.run("sh", "consume.sh", TOPIC, "1", "false")
    assert ran.returncode == 0, ran.stderr
    (resting,) = shop.ask("GET", f"topics/{TOPIC}/messages/?state=retry")["results"]
    assert resting["failures"] == 1
    shop.ask("DELETE", f"topics/{TOPIC}/messages/{resting['id']}/")


def test_node_consumes_commits_and_rolls_back(shop: Shop, node: str) -> None:
    shop.send(*({"n": n} for n in range(12)), {"fail": True})
    ran = shop.run(node, "consume.mjs", TOPIC, "13")
    assert ran.returncode == 0, ran.stderr
    assert [json.loads(line)["n"] for line in ran.stdout.splitlines()] == list(range(12))
    (resting,) = shop.ask("GET", f"topics/{TOPIC}/messages/?state=retry")["results"]
    assert resting["error"] == "Error: the body says so"
    shop.ask("DELETE", f"topics/{TOPIC}/messages/{resting['id']}/")
    check_empty(shop)


def test_node_gives_back_what_it_has_not_begun(shop: Shop, node: str) -> None:
    shop.send(*({"n": n} for n in range(5)))
    ran = shop.run(node, "consume.mjs", TOPIC, "2")
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 2
    found = shop.ask("GET", f"topics/{TOPIC}/")
    assert (found["waiting"], found["running"]) == (3, 0)
    shop.ask("POST", f"topics/{TOPIC}/purge/", {"state": "waiting"})


@pytest.fixture(params=["sh", "node", "python"])
def program(request: pytest.FixtureRequest) -> list[str]:
    """Each example, as a command."""
    if request.param == "python":
        return [*PYTHON, "consume.py"]
    if request.param == "sh":
        request.getfixturevalue("curl")
        return ["sh", "consume.sh"]
    return [request.getfixturevalue("node"), "consume.mjs"]


@pytest.mark.parametrize(
    ("wrong", "topic", "said"),
    [
        ({"token": "wrong"}, TOPIC, "401"),
        ({}, "nothing", "topic_not_found"),
        ({"path": "/elsewhere"}, TOPIC, "404"),
    ],
)
def test_a_consumer_whom_nothing_helps_says_why_and_ends(
    shop: Shop, program: list[str], wrong: dict[str, str], topic: str, said: str
) -> None:
    other = Shop(shop.environment, 1)
    other.url, other.token = shop.url + wrong.get("path", ""), wrong.get("token", shop.token)
    ran = other.run(*program, topic)
    assert ran.returncode == 1
    assert said in ran.stderr


Answer = tuple[int, str, bytes]
"""Status, Retry-After, body."""

HELD = (
    b'{"messages":[{"id":"0.YQ","slot":0,"receipt":"1.r","delivery":1,"body":{"n":1},"encoding":"json","key":null}],'
    b'"timeout":30,"next_slot":null}'
)
HANDED_OUT: Answer = (200, "", HELD)
DONE: Answer = (200, "", b'{"results":[],"outcomes":{"ok":1}}')
UNAVAILABLE: Answer = (503, "1", b'{"code":"redis_unavailable","detail":"not now"}')
CROWDED: Answer = (200, "1", b'{"messages":[],"timeout":30,"next_slot":null,"wait_refused":true}')
UNKNOWN: Answer = (409, "", b'{"code":"refused","detail":"the topic is not SERIAL"}')


class Asked(NamedTuple):
    """A request that a server has had."""

    verb: str
    request: Any
    at: float


def consume_from(
    shop: Shop, program: list[str], *answers: Answer
) -> tuple[subprocess.CompletedProcess[str], list[Asked]]:
    """Let a program consume one message from a server that gives these answers in turn, and the last one on and on."""
    asked: list[Asked] = []

    class Scripted(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(Asked(self.path.split("/")[-2], request, time.monotonic()))
            status, again, answer = answers[min(len(asked), len(answers)) - 1]
            self.send_response(status)
            if again:
                self.send_header("Retry-After", again)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    other = Shop(shop.environment, 0)
    with serving(Scripted) as other.url:
        ran = other.run(*program, TOPIC, "1")
    assert ran.returncode == 0, ran.stderr
    return ran, asked


def test_a_consumer_that_may_not_wait_asks_again_a_second_later(shop: Shop, program: list[str]) -> None:
    _, asked = consume_from(shop, program, CROWDED, CROWDED, HANDED_OUT, DONE)
    assert [each.verb for each in asked] == ["prepare", "prepare", "prepare", "commit"]
    assert asked[1].at - asked[0].at >= 0.9
    assert asked[2].at - asked[1].at >= 0.9


def test_a_consumer_goes_on_where_the_server_does_not_know_what_it_holds(
    shop: Shop, program: list[str]
) -> None:
    away: Answer = (503, "", UNAVAILABLE[2])
    _, asked = consume_from(shop, program, away, UNKNOWN, HANDED_OUT, DONE)
    assert [each.verb for each in asked] == ["prepare", "prepare", "prepare", "commit"]
    assert ["held" in each.request for each in asked] == [False, True, False, False]


def test_a_consumer_outlasts_a_server_in_trouble(shop: Shop, program: list[str]) -> None:
    ran, asked = consume_from(shop, program, UNAVAILABLE, HANDED_OUT, UNAVAILABLE, DONE)
    assert json.loads(ran.stdout) == {"n": 1} and "503" in ran.stderr
    # After the trouble it asks what it holds, and says "commit" until it is heard.
    assert [each.verb for each in asked] == ["prepare", "prepare", "commit", "commit"]
    assert asked[1].request["held"] is True
