"""What REST, the admin and a command show of a message, while it lives and after its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client, override_settings
from django.urls import reverse

from django_rmq import Message, Reject, Retry, cancel_message, listener, send_message
from django_rmq.api.messages import StatusAnswer
from django_rmq.exceptions import Cancelled
from django_rmq.testing import Clock, clock_from_now, drain, memory_broker
from django_rmq.worker.listener_registry import isolated
from tests.support.brokers import Broker, project_on

pytestmark = pytest.mark.django_db

TOPICS: dict[str, dict[str, Any]] = {
    "kept": {"TYPE": "priority", "SLOTS": 2, "MAX_RETRIES": 1, "BACKOFF": 60, "OUTCOME_RETENTION": "1h"},
    "forgotten": {"TYPE": "priority", "SLOTS": 2, "MAX_RETRIES": 1, "BACKOFF": 60},
    "secret": {"TYPE": "priority", "SLOTS": 2, "OUTCOME_RETENTION": "1h"},
}
Staff = Callable[..., Client]


def redact(topic: str, body: Any) -> Any:
    return "***"


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"TOPICS": TOPICS, "AUTODISCOVER": None, "ADMIN": {"FORMATTER": {"secret": f"{__name__}.redact"}}}


@pytest.fixture
def still(settings: dict[str, Any]) -> Iterator[Clock]:
    """A broker in memory whose time stands still until it is advanced."""
    rmq = {"BROKER": "memory", **settings}
    with override_settings(RMQ=rmq), memory_broker(found := clock_from_now()), isolated():
        yield found


@pytest.fixture
def live(settings: dict[str, Any], redis_url: str, redis_client: Any, prefix: str) -> Iterator[Broker]:
    found = Broker(redis_client, prefix)
    with project_on(found, REDIS=redis_url, **settings), isolated():
        yield found


def rest(client: Client, topic: str, name: str, status: int = 200) -> Any:
    response = client.get(f"/api/rmq/v1/topics/{topic}/messages/{name}/")
    assert response.status_code == status, response.content
    return response.json()


def page(client: Client, topic: str, name: str, status: int = 200) -> str:
    response = client.get(reverse("admin:django_rmq_topic_message", args=[topic, name]))
    assert response.status_code == status
    return response.content.decode()


def run(topic: str, *outcomes: Any) -> None:
    """Let the listener of a topic end with these outcomes, one after the other."""
    left = list(outcomes)

    @listener(topic)
    def work(message: Message) -> None:
        message.progress(0.5, f"half of {message.body}")
        if (outcome := left.pop(0)) is not None:
            raise outcome

    drain(topic, raise_errors=False, live=True, limit=len(outcomes))


def test_rest_shows_the_copies_of_a_message_and_its_status(still: Clock, staff: Staff) -> None:
    client = staff("view_topic", "view_bodies")
    sent = send_message("kept", "x", priority=500, on_commit=False)
    found = rest(client, "kept", sent.id)
    assert [one["state"] for one in found["results"]] == ["waiting"]
    assert (found["status"]["state"], found["status"]["priority"]) == ("waiting", 500)
    run("kept", Retry("no"))
    found = rest(client, "kept", sent.id)
    assert [one["state"] for one in found["results"]] == ["resting"]
    status = found["status"]
    assert (status["state"], status["attempts"], status["error_class"]) == ("resting", 1, "Retry")
    assert status["due_ms"] == still() // 1000 + 60_000


def test_rest_shows_the_status_of_a_message_that_has_ended(live: Broker, staff: Staff) -> None:
    client = staff("view_topic", "view_bodies")
    sent = send_message("kept", "x", priority=500, on_commit=False)
    run("kept", None)
    found = rest(client, "kept", sent.id)
    assert found["results"] == []
    status = found["status"]
    assert (status["state"], status["attempts"], status["reason"]) == ("done", 1, "")
    assert status["worker"]
    assert status["delivered_ms"] <= status["ended_ms"]
    other = send_message("forgotten", "x", priority=500, on_commit=False)
    run("forgotten", None)
    assert rest(client, "forgotten", other.id, 404)["code"] == "message_gone"


@pytest.mark.parametrize("topic", ["kept", "secret"])
def test_who_may_not_see_bodies_follows_a_message_by_its_sealed_id(
    live: Broker, staff: Staff, topic: str
) -> None:
    client = staff("view_topic", *(["view_bodies"] if topic == "secret" else []))
    sent = send_message(topic, "x", priority=500, on_commit=False)
    (listed,) = client.get(f"/api/rmq/v1/topics/{topic}/messages/?state=store").json()["results"]
    assert "~" in listed["id"]
    seen: list[Any] = []

    @listener(topic)
    def work(message: Message) -> None:
        message.progress(0.5, "half of x")
        seen.append(rest(client, topic, listed["id"])["status"])

    drain(topic, live=True)
    assert [(one["state"], one["progress"], one["progress_text"]) for one in seen] == [("running", 0.5, "")]
    found = rest(client, topic, listed["id"])
    assert (found["results"], found["status"]["state"]) == ([], "done")
    # A plain id would show whether a guessed body is right.
    rest(client, topic, sent.id, 404)


def test_the_admin_shows_a_timeline(still: Clock, staff: Staff) -> None:
    client = staff("view_topic", "view_bodies")
    sent = send_message("kept", "x", priority=500, on_commit=False)
    text = page(client, "kept", sent.id)
    assert "Timeline" in text
    assert "is not recorded" in text
    run("kept", Retry("no"))
    assert "Next delivery" in page(client, "kept", sent.id)
    still.advance(60)
    run("kept", Reject("no"))
    text = page(client, "kept", sent.id)
    steps = [
        text.index(f"<dt>{what}</dt>", text.index("rmq-timeline")) for what in ("Sent", "Failed", "Died")
    ]
    assert steps == sorted(steps)
    assert "2 failures in all" in text
    assert "rejected" in text


def test_the_admin_shows_a_message_that_has_ended(still: Clock, staff: Staff) -> None:
    client = staff("view_topic", "view_bodies")
    sent = send_message("kept", "x", priority=500, on_commit=False)
    run("kept", None)
    text = page(client, "kept", sent.id)
    assert "The message has ended." in text
    assert "<dt>Done</dt>" in text
    assert "Message not found" not in text
    still.advance(3_600)
    assert "Message not found" in page(client, "kept", sent.id, 404)


def test_a_message_that_was_cancelled_is_shown_with_its_end(still: Clock, staff: Staff) -> None:
    client = staff("view_topic", "view_bodies")
    sent = send_message("kept", "x", priority=500, on_commit=False)

    @listener("kept")
    def work(message: Message) -> None:
        cancel_message("kept", "x", on_commit=False)
        message.extend()
        raise Cancelled

    drain("kept", live=True)
    text = page(client, "kept", sent.id)
    assert text.index("<dt>Delivered</dt>") < text.index("<dt>Cancelled</dt>")
    assert "failure in all" not in text
    state = rest(client, "kept", sent.id)["status"]["state"]
    assert state == "cancelled"
    assert StatusAnswer().fields["state"].run_validation(state) == state


def test_the_admin_says_where_nothing_is_kept(still: Clock, staff: Staff) -> None:
    client = staff("view_topic", "view_bodies")
    sent = send_message("forgotten", "x", priority=500, on_commit=False)
    assert "has no OUTCOME_RETENTION" in page(client, "forgotten", sent.id)
    run("forgotten", None)
    assert "Message not found" in page(client, "forgotten", sent.id, 404)


def test_the_admin_shows_what_runs_and_how_far_it_is(still: Clock, staff: Staff) -> None:
    client = staff("view_topic", "view_bodies")
    texts: list[str] = []

    @listener("kept")
    def work(message: Message) -> None:
        message.progress(0.25, "<b>rendering</b>")
        texts.append(page(client, "kept", message.id))

    send_message("kept", "x", priority=500, on_commit=False)
    drain()
    assert "25 % done: &lt;b&gt;rendering&lt;/b&gt;" in texts[0]
    assert "<dt>Delivered</dt>" in texts[0]


def test_the_command_shows_one_message(still: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*arguments: str) -> str:
        call_command("rmqstats", "kept", *arguments)
        return capsys.readouterr().out

    sent = send_message("kept", {"n": 1}, priority=500, on_commit=False)
    assert "state         waiting" in shown("--body", '{"n": 1}')
    run("kept", None)
    found = json.loads(shown("--id", sent.id, "--json"))
    assert (found["state"], found["attempts"], found["took"]) == ("done", 1, 0.0)
    assert "attempts      1" in shown("--id", sent.id)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["kept", "--id", "1", "--key", "k"], "by --id, or by --key or --body"),
        (["kept", "--body", "{"], "not JSON"),
        (["kept", "--body", "[" * 100_000], "not JSON"),
        (["--body", "1"], "give that topic"),
        (["kept", "forgotten", "--body", "1"], "give that topic"),
    ],
)
def test_the_command_says_what_is_wrong(still: Clock, arguments: list[str], why: str) -> None:
    with pytest.raises(CommandError, match=why) as raised:
        call_command("rmqstats", *arguments)
    assert raised.value.returncode == 2
