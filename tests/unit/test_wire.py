"""Commands as bytes: the same whoever encodes them, and one message travels in a command that was written before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hiredis import pack_command

from django_rmq.core import lua
from django_rmq.core.commands import ack, fetch, inspect, send
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.replies import Sent
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.redis import wire
from django_rmq.core.redis.broker import ServerConnection

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


class Told(ServerConnection):
    """Notes what would go over the wire."""

    told: bytes
    answer: Any = (b"stored", 1_790_000_000_000)

    def ask(self, packed: bytes) -> Any:
        self.told = packed
        return self.answer


TOPICS = [
    Topic("t", kind, slots=slots, identity=identity, max_backlog=backlog, max_retries=retries)
    for kind in TopicType
    for slots in (1, 16)
    for identity in ("body", "key")
    for backlog in (None, 100)
    for retries in (3, 16)
]
MEMBERS = [b"m", b"", b"\r\n$1\r\n", "é".encode(), b"x" * 70_000]


def sent(topic: Topic, slot: int, score: int, member: bytes, envelope: bytes) -> Call[Sequence[Sent]]:
    envelopes = [envelope] if topic.keyed else []
    if topic.type is TopicType.RANGE_MERGE:
        return send.send_merge(topic, slot, score, [member], envelopes)
    return send.send_replace(topic, slot, [score], [member], envelopes)


@pytest.mark.parametrize("room", [1, 10_000])
def test_a_framed_command_is_the_one_that_would_be_packed(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr(wire, "FRAMES", room)
    told = Told(None, "p:", None)
    for _ in range(2):
        for topic in TOPICS:
            for slot in {0, topic.slots - 1}:
                for score, member in enumerate(MEMBERS, 1_000):
                    call = sent(topic, slot, score, member, b"{}\n" + member)
                    found = told.run(call)
                    sha = lua.load(call.script).sha
                    command: Any = ("EVALSHA", sha, 7, *call.keys("p:"), *call.arguments("p:"), b"")
                    assert told.told == pack_command(command)
                    assert found == call.read([*told.answer], "p:")
    assert 0 < len(told.frames) <= room


def test_what_is_sent_with_and_without_an_envelope_has_a_frame_each() -> None:
    told, topic = Told(None, "", None), Topic("t", TopicType.PRIORITY, identity="key")
    for envelopes in ([b"{}"], [], [b"{}"]):
        told.run(send.send_replace(topic, 0, [1_000], [b"m"], envelopes))
        assert int(told.told[1 : told.told.index(b"\r")]) == told.told.count(b"\r\n$"), (
            "as many arguments as it says"
        )


@pytest.mark.parametrize("slots", [range(1), range(10), range(90, 110), [0, 1_048_575]])
def test_a_worker_s_calls_are_framed_for_all_slots_together(slots: Sequence[int]) -> None:
    told = Told(None, "p0:_1}", None)
    topics = [
        Topic(name, kind, slots=1 << 20, outcome_retention_ms=retention)
        for name in ("t_0", "10")
        for kind in TopicType
        for retention in (None, 60_000)
    ]
    told.answer = [b"empty", b""]
    for topic in topics:
        for slot in slots:
            for after in (None, ("1.5", b"m")):
                for call in (
                    fetch.prepare(topic, slot, "owner", 7, 100, 65_536, after),
                    ack.commit_delivery(topic, slot, 12, 3),
                ):
                    told.run(call)
                    command: Any = wire.command(call, told.prefix, None)
                    assert told.told == pack_command(command)
    assert len(told.frames) == 2 * len(topics) * len({len(str(slot)) for slot in slots})


@pytest.mark.parametrize("kind", TopicType)
def test_what_a_slot_answers_about_one_message_is_read_as_of_many(kind: TopicType) -> None:
    told, topic = Told(None, "", None), Topic("t", kind)
    told.answer = [b"mixed", [b"merged"], [b"5"]]
    assert told.run(sent(topic, 0, 1_000, b"m", b"")) == [Sent("merged", 5.0)]
    told.answer = [b"stored"]
    if kind is not TopicType.RANGE_MERGE:
        assert told.run(sent(topic, 0, 1_000, b"m", b"")) == [Sent("stored", 1_000)]
