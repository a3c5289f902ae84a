"""One message travels in a command that was written before: it is the command that would be packed for it alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hiredis import pack_command

from django_rmq.core import lua
from django_rmq.core.commands import send
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.replies import Sent
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.redis import wire
from django_rmq.core.redis.broker import ServerConnection


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
                    command: Any = ("EVALSHA", sha, 5, *call.keys("p:"), *call.arguments("p:"), b"")
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


@pytest.mark.parametrize("kind", TopicType)
def test_only_what_will_be_used_again_is_remembered(monkeypatch: pytest.MonkeyPatch, kind: TopicType) -> None:
    monkeypatch.setattr(wire, "FRAMES", 8)
    for slots, remembered in ((8, 1), (16, 0)):
        told, topic = Told(None, "", None), Topic("t", kind, slots=slots)
        for _ in range(2):
            told.run(sent(topic, 3, 1_000, b"m", b""))
        assert len(told.frames) == remembered


@pytest.mark.parametrize("kind", TopicType)
def test_what_a_slot_answers_about_one_message_is_read_as_of_many(kind: TopicType) -> None:
    told, topic = Told(None, "", None), Topic("t", kind)
    told.answer = [b"mixed", [b"merged"], [b"5"]]
    assert told.run(sent(topic, 0, 1_000, b"m", b"")) == [Sent("merged", 5.0)]
    told.answer = [b"stored"]
    if kind is not TopicType.RANGE_MERGE:
        assert told.run(sent(topic, 0, 1_000, b"m", b"")) == [Sent("stored", 1_000)]
