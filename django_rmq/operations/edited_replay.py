"""The replay of a dead message with another body.

If the body decides the identity or the slot of the message, the edited one is another message, and two slots change.
No script does that in one step, so its order and its origin make a repetition harmless.
"""

from __future__ import annotations

import json
from hashlib import sha256

from django_rmq import connections, sending
from django_rmq.core.commands import operate
from django_rmq.core.model.body_codec import encode_body
from django_rmq.core.model.envelope import Envelope, derived_origin, encode_envelope
from django_rmq.core.model.keys import slot_of
from django_rmq.core.model.replies import DescribeReply
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import basis_of_field, score_at_once
from django_rmq.core.producer.validation import check_stored_basis
from django_rmq.exceptions import InvalidMessage
from django_rmq.operations.actions import ActionResult, chosen, instead, public_id
from django_rmq.operations.authorization import Permission
from django_rmq.operations.context import OperationContext, identified
from django_rmq.operations.message_view import MessageCopy, from_look
from django_rmq.operations.messages import look_at
from django_rmq.operations.sends import charge


def replay_edited(
    context: OperationContext, name: str, message_id: str, body: object, *, charged_bytes: int | None = None
) -> ActionResult:
    """Replay one dead message with another body. Outcomes: as ``replay``.

    If the body is the message's identity, the edited one is another message: it is sent, then the dead one is
    deleted. If two people do that at the same time, both messages may be sent; a double click sends one.
    ``charged_bytes``: the actor is charged with one message of this size. Raises ``InvalidMessage`` for a body that
    cannot be sent, and the errors of ``spend_sends``.
    """
    topic = context.permitted(name, Permission.REPLAY, Permission.EDIT)
    if topic.accumulate:
        raise InvalidMessage(
            f"messages of topic {topic.name} cannot be edited, because each may hold several bodies (ACCUMULATE): "
            "replay them as they are"
        )
    encode_body(topic, body)
    at, looked = look_at(context, topic, message_id)
    word = "gone"
    if at is not None and at.member is not None and looked is not None:
        if looked.dead is None:
            word = instead(looked)
        else:
            if charged_bytes is not None:
                charge(context, 1, charged_bytes)
            slot, member, dead = at.slot, at.member, looked
            word = context.in_present_slots(
                topic, lambda topic: _replay(context, topic, slot, member, dead, body)
            )
    public = public_id(topic, message_id, at or identified(context, topic, message_id))
    context.record("replay edited", topic.name, {word: 1}, chosen([public], "with another body"))
    return ActionResult({message_id: word})


def _replay(
    context: OperationContext, topic: Topic, slot: int, member: bytes, looked: DescribeReply, body: object
) -> str:
    (dead,) = (copy for copy in from_look(topic, slot, member, looked) if copy.state == "dead")
    producer = connections.get_producer()
    broker = context.broker
    # It is due at once, or has its former priority.
    score = score_at_once(topic, dead.scored, broker.now_ms())
    if topic.keyed:
        basis = dead.slot_basis if topic.slot_basis is None else None
        envelope = _edited(topic, dead, body, broker.now_ms())
        outgoing = producer.again(topic, body, member, score, envelope, basis)
        # The message stays in its slot, so one script replaces its body and replays it.
        if outgoing.slot == slot or topic.slot_basis is None:
            (word,) = broker.run(operate.replay(topic, slot, [member], [envelope]))
            return "gone" if word == "not_found" else word
    else:
        outgoing = producer.outgoing(topic, body, score)
        if topic.slot_basis is None and slot != slot_of(member, topic.slots):
            # It was sent with an explicit slot basis, which is no longer known.
            outgoing = outgoing._replace(slot=slot, crc=None)
        if outgoing.member == member:
            (word,) = broker.run(operate.replay(topic, slot, [member]))
            return "gone" if word == "not_found" else word
    sent = sending.send_outgoing(outgoing, body)
    # The edited message has been sent first: if this process dies here, both exist, and none is lost.
    broker.run(operate.remove(topic, slot, [member], "dead"))
    return "merged" if sent.status in ("merged", "replaced") else "replayed"


def _edited(topic: Topic, dead: MessageCopy, body: object, now_ms: int) -> bytes:
    """Return the envelope of a keyed message with another body; an expiry in the past is dropped."""
    expires_ms = dead.expires_ms if dead.expires_ms > now_ms else 0
    raw = encode_body(topic, body)
    origin = _edited_origin(topic, dead, raw) if topic.origin else None
    basis = dead.slot_basis
    if basis is not None and topic.slot_basis is not None:
        basis = check_stored_basis(basis_of_field(topic, body))
    envelope = Envelope(
        raw,
        expires_ms,
        basis,
        dead.headers or None,
        origin,
        max_retries=dead.max_retries,
        timeout=dead.timeout,
    )
    return encode_envelope(envelope)


def _edited_origin(topic: Topic, dead: MessageCopy, raw: bytes) -> str:
    """Return the origin of a dead message with another body: of a new send, which is the same if it is repeated.

    Where the edited message has another slot, it is sent first and the dead one is deleted then. A process that dies in
    between, or loses the answer, does both again, and the effects of the two messages happen once.
    """
    key = (dead.member or b"").hex()
    named = [topic.name, key, dead.slot_basis, dead.score, dead.first_failed_ms, sha256(raw).hexdigest()]
    return derived_origin(dead.at_ms or 0, f"edited {json.dumps(named)}")
