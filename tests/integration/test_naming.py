"""How an existing message is named, where its slot follows from a field of its body."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from django_rmq import (
    InvalidBody,
    InvalidMessage,
    cancel_message,
    message_status,
    remove_message,
    send_message,
)
from django_rmq.testing import memory_broker
from django_rmq.worker.listener_registry import isolated
from tests.support.typed_bodies import Reason

KEYED: dict[str, Any] = {"TYPE": "fixed_time", "SLOTS": 16, "IDENTITY": "key"}
PRICES = "tests.support.typed_bodies.PriceChanged"
TOPICS: dict[str, dict[str, Any]] = {
    "untyped": {**KEYED, "SLOT_BASIS": "shop"},
    "typed": {**KEYED, "SLOT_BASIS": "shop", "BODY": PRICES},
    "reasons": {**KEYED, "SLOT_BASIS": "reason", "BODY": PRICES},
    "whole": {"TYPE": "fixed_time", "SLOTS": 16, "SLOT_BASIS": "shop", "BODY": PRICES},
    "text": {"TYPE": "fixed_time", "SLOTS": 2, "BODY": "text"},
}
LATE = datetime(2096, 10, 2, tzinfo=UTC)
BODY = {"shop": 7, "lines": [], "at": "2026-11-23T12:00:00Z", "reason": "campaign"}


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    rmq = {"REDIS": "redis://nowhere", "TOPICS": TOPICS, "AUTODISCOVER": None, "ON_COMMIT": False}
    with override_settings(RMQ=rmq), isolated(), memory_broker():
        yield


@pytest.mark.parametrize("named", [{"shop": 7}, BODY], ids=["the field", "the body"])
@pytest.mark.parametrize("name", ["untyped", "typed"])
def test_the_field_names_a_keyed_message(name: str, named: dict[str, Any]) -> None:
    for act in (remove_message, cancel_message):
        send_message(name, BODY, key="k", fixed_time=LATE)
        assert message_status(name, named, key="k").state == "waiting"
        assert act(name, named, key="k").status == "waiting"
        assert message_status(name, named, key="k").state == "unknown"


def test_a_whole_body_names_its_message_by_what_would_be_stored() -> None:
    send_message("reasons", BODY, key="k", fixed_time=LATE)
    assert message_status("reasons", {**BODY, "reason": Reason.CAMPAIGN}, key="k").state == "waiting"
    assert message_status("reasons", {"reason": "campaign"}, key="k").state == "waiting"


@pytest.mark.parametrize("name", ["untyped", "typed"])
def test_a_body_without_the_field_names_nothing(name: str) -> None:
    for body in (None, {"store": 7}, 7):
        with pytest.raises(InvalidMessage):
            message_status(name, body, key="k")


def test_elsewhere_the_whole_body_is_needed() -> None:
    with pytest.raises(InvalidBody):
        send_message("typed", {"shop": 7}, key="k", fixed_time=LATE)
    with pytest.raises(InvalidBody):
        remove_message("whole", {"shop": 7})


@pytest.mark.parametrize("name", ["untyped", "typed"])
def test_the_commands_take_a_key_and_the_field(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    send_message(name, BODY, key="k", fixed_time=LATE)
    call_command("rmqstats", name, "--key", "k", "--body", '{"shop": 7}')
    assert "state         waiting" in capsys.readouterr().out
    call_command("rmqcancel", name, "--key", "k", "--body", '{"shop": 7}')
    assert capsys.readouterr().out == f"{name}: 1 deleted\n"


def test_the_commands_take_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    send_message("text", "some text", fixed_time=LATE)
    call_command("rmqstats", "text", "--body", "some text")
    assert "state         waiting" in capsys.readouterr().out
    call_command("rmqcancel", "text", "--body", "some text")
    assert capsys.readouterr().out == "text: 1 deleted\n"


@pytest.mark.parametrize("more", [("--key", "k"), ("--body", "1"), ("--slot-basis", "s")])
@pytest.mark.parametrize("command", ["rmqstats", "rmqcancel"])
def test_an_id_is_the_whole_name(command: str, more: tuple[str, str]) -> None:
    with pytest.raises(CommandError, match="by --id, or by --key or --body") as error:
        call_command(command, "untyped", "--id", "0.YQ", *more)
    assert error.value.returncode == 2
