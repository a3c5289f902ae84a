"""Commands are the same bytes whether hiredis encodes them or Python does, where hiredis is not installed."""

from __future__ import annotations

from typing import Any

import pytest

from django_rmq.core.commands import inspect, send
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.redis import wire

TOPIC = Topic("prices", TopicType.PRIORITY)
COMMANDS: list[tuple[Any, ...]] = [
    ("SCRIPT", "LOAD", b"return 1"),
    ("EVALSHA", "5a", 2, b"k1", b"k2", -5, 0, 1.5, float("inf"), 1e22, "é", "", b"\r\n\0"),
    wire.command(inspect.count(TOPIC, 3), "mine:", None),
    wire.command(send.send_replace(TOPIC, 3, [100], [b"a"]), "", lambda: 1_700_000_000_000_000),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command[0]))
def test_python_encodes_as_hiredis_does(command: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    packed = wire.packed(command)
    monkeypatch.setattr(wire, "pack_command", None)
    assert wire.packed(command) == packed
