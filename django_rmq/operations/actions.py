"""Actions on messages: what each may do to a message in its state, and their run on messages that are named by ids.

``authorization.PERMISSION_OF`` has the permission of each. The script decides about each message when it runs, and answers a
word: if two people act at the same time, the second one gets the state that it found. The same actions on all selected
messages are in ``bulk_actions``.
A dead message can be replayed with another body, too: if the body decides the identity or the slot of the message, the
edited one is another message, which is sent.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from django.utils.translation import gettext as _

from django_rmq import connections, sending
from django_rmq.core.commands import inspect, operate
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.body_codec import encode_body
from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.envelope import Envelope, derived_origin, encode_envelope, future_expiry
from django_rmq.core.model.replies import DescribeReply, cut_error
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import (
    basis_of_field,
    check_fixed_time,
    check_priority,
    check_stored_basis,
    instant_ms,
    score_at_once,
    slot_of,
)
from django_rmq.exceptions import InvalidMessage, InvalidRequest, OperationRefused, RmqError
from django_rmq.message_ids import (
    LOOKED_AT_ONCE,
    LocatedMessage,
    MessageIdentity,
    find_messages,
    find_moved,
    sealed_id,
)
from django_rmq.operations.audit_trail import chosen, record, record_outcomes
from django_rmq.operations.authorization import (
    EDITED_REPLAY,
    PERMISSION_OF,
    Actor,
    OperationContext,
    Permission,
    identified,
    require_search,
    search_rounds,
)
from django_rmq.operations.bulk import BulkProgress, CallOf
from django_rmq.operations.message_details import copies_of, locate_message
from django_rmq.operations.message_view import MessageCopy, from_reply
from django_rmq.operations.sends import charge
from django_rmq.operations.undo import Trash, open_trash
from django_rmq.sending import cancel_message

_BOTH_LIVE = "running_and_waiting"
_DELETED = {
    "waiting": "deleted",
    "resting": "deleted",
    "dead": "deleted",
    _BOTH_LIVE: "running",
    "not_found": "gone",
}
_CANCELLED = {
    "waiting": "deleted",
    "resting": "deleted",
    "running": "notified",
    _BOTH_LIVE: "notified",
    "not_found": "gone",
}
_BURIED = {"waiting": "buried", "resting": "buried", _BOTH_LIVE: "running", "not_found": "gone"}
_RESCHEDULED = {"waiting": "rescheduled", "resting": "rescheduled", "not_found": "gone"}


@dataclass(frozen=True, slots=True)
class MessageAction:
    """One action on messages."""

    name: str
    call: CallOf
    outcomes: Mapping[str, str] = field(default_factory=dict)
    """The script's word → the outcome."""
    detail: str = ""
    """The text of the audit trail beside the name of the action. It never has any content."""

    def renamed(self, progress: BulkProgress) -> BulkProgress:
        """Return the progress of a sweep with outcomes instead of words."""
        renamed: Counter[str] = Counter()
        for word, count in progress.outcomes.items():
            renamed[self.outcomes.get(word, "gone" if word == "not_found" else word)] += count
        return replace(progress, outcomes=dict(renamed))


REPLAY = MessageAction("replay", operate.replay)


def delete_action(copy: str) -> MessageAction:
    """Return the action that deletes a copy: ``live`` or ``dead``."""
    return MessageAction(
        "delete", lambda topic, slot, members: operate.remove(topic, slot, members, copy), _DELETED
    )


CANCEL = MessageAction("cancel", operate.cancel, _CANCELLED)


def bury_action(actor: Actor, why: str) -> MessageAction:
    """Return the action that puts messages into Dead. Its reason cannot be taken for the class of an error."""
    reason = cut_error(f"put into Dead by {actor.name}{f': {why}' if why else ''}").decode()
    return MessageAction(
        "bury",
        lambda topic, slot, members: operate.bury(topic, slot, members, reason),
        _BURIED,
        "with a reason" if why else "",
    )


def reschedule_action(score: int, *, is_time: bool) -> MessageAction:
    """Return the action that gives waiting messages another score."""
    to = f"priority {score}"
    if is_time:
        to = datetime.fromtimestamp(score / 1000, UTC).isoformat(timespec="milliseconds")
    return MessageAction(
        "reschedule",
        lambda topic, slot, members: operate.reschedule(topic, slot, [score] * len(members), members),
        _RESCHEDULED,
        f"to {to}",
    )


MAX_IDS = 1_000
"""Maximum number of messages named in one call."""


@dataclass(frozen=True, slots=True)
class ActionResult:
    """The outcomes of an operation on named messages."""

    found: dict[str, str]
    """Id → outcome, in the order given."""
    undo: str = ""
    """The id by which ``undo`` brings deleted messages back; empty if none are kept."""
    kept: int = 0
    """The number of deleted messages that can be brought back."""

    @property
    def outcomes(self) -> dict[str, int]:
        """Outcome → number of messages."""
        return dict(Counter(self.found.values()))


def replay(context: OperationContext, name: str, ids: Sequence[str]) -> ActionResult:
    """Send dead messages again, with their full number of retries.

    Outcomes: ``replayed``; ``merged`` (it waits already, and the dead copy is gone). If the message is not
    dead (any more), its actual state: ``waiting``, ``resting``, ``running`` or ``gone``. All actions on
    named messages also have ``not_found``: the message may exist, but was not found near the place in its
    sealed id, or may be on its way while the topic is being re-slotted.
    """
    return _do(context, REPLAY, context.permitted(name, PERMISSION_OF["replay"]), ids)


def id_of(
    context: OperationContext,
    name: str,
    body: object = None,
    *,
    key: str | None = None,
    slot_basis: object = None,
) -> str:
    """Return the id of a message that is named by its body, or on a keyed topic by its key. It may not exist.

    Raises ``InvalidMessage``, and the errors of ``require_search``.
    """
    declared = context.declared(name, Permission.VIEW)
    # An action on the id shows whether the topic has a message with this key or body.
    require_search(context.actor, declared.name)
    connections.refresh_definitions()
    out = connections.get_producer().outgoing(declared, body, 0, key=key, slot_basis=slot_basis)
    return message_id(out.slot, out.member)


def delete(
    context: OperationContext, name: str, ids: Sequence[str], copy: str, *, keep: bool = True
) -> ActionResult:
    """Delete messages. ``copy``: ``live`` (waiting, resting or in flight) or ``dead``.

    ``keep``: they can be brought back for an hour (``undo``). Outcomes: ``deleted``; ``running`` (it ends with its current
    delivery, and is never tried again); ``gone`` if there is no such copy (any more).
    """
    topic = context.permitted(name, PERMISSION_OF["delete"])
    if copy not in ("live", "dead"):
        raise InvalidRequest(_("the copy must be 'live' or 'dead', got %(copy)r") % {"copy": copy})
    return _do(context, delete_action(copy), topic, ids, f"{copy} copy", keep=keep)


def delete_only(context: OperationContext, name: str, message_id: str, *, keep: bool = True) -> ActionResult:
    """Delete the only copy of a message. Outcomes: as ``delete``; ``both``: there are two, and nothing was done."""
    copies = copies_of(context, context.permitted(name, PERMISSION_OF["delete"]), message_id)
    queues = {"dead" if one.state == "dead" else "live" for one in copies}
    if len(queues) > 1:
        return ActionResult({message_id: "both"})
    return delete(context, name, [message_id], queues.pop(), keep=keep)


def cancel(context: OperationContext, name: str, ids: Sequence[str]) -> ActionResult:
    """Delete waiting and resting messages, and notify the listeners of running ones.

    Outcomes: ``deleted``; ``notified`` (it runs, and ends as cancelled unless its listener succeeds); ``claimed``
    (a Spark consumer has it, and cannot be notified); ``gone``.
    """
    return _do(context, CANCEL, context.permitted(name, PERMISSION_OF["cancel"]), ids)


def cancel_sent(
    context: OperationContext,
    name: str,
    body: object = None,
    *,
    key: str | None = None,
    slot_basis: object = None,
) -> str:
    """Cancel the message with this body or key; return an outcome of ``cancel``.

    Raises ``InvalidMessage``, and the errors of ``require_search``.
    """
    require_search(context.actor, context.declared(name, PERMISSION_OF["cancel"]).name)
    word = cancel_message(name, body, key=key, slot_basis=slot_basis, on_commit=False)
    outcome = CANCEL.outcomes.get(word, str(word))
    record(context.actor, "cancel", name, {outcome: 1})
    return outcome


def bury(context: OperationContext, name: str, ids: Sequence[str], why: str = "") -> ActionResult:
    """Put messages into Dead for inspection.

    Outcomes: ``buried``, ``running`` (it dies when its delivery ends), ``dead`` (it was already), ``gone``.
    """
    topic = context.permitted(name, PERMISSION_OF["bury"])
    return _do(context, bury_action(context.actor, why), topic, ids)


def reschedule(
    context: OperationContext,
    name: str,
    ids: Sequence[str],
    *,
    due: datetime | None = None,
    priority: int | None = None,
) -> ActionResult:
    """Give waiting messages another due time (an aware datetime; past: at once), or another priority.

    Outcomes: ``rescheduled``; ``running``; ``refused`` (a retry on a priority topic keeps its place);
    ``gone``. Raises ``OperationRefused`` for a time on a priority topic and the reverse.
    """
    topic = context.permitted(name, PERMISSION_OF["reschedule"])
    score = new_score(topic, due, priority)
    return _do(context, reschedule_action(score, is_time=not topic.is_priority), topic, ids)


def new_score(topic: Topic, due: datetime | None, priority: int | None) -> int:
    """Return the score of a due time or a priority. Raises ``OperationRefused`` if the topic is not ordered by it."""
    if topic.is_priority:
        if due is not None or priority is None:
            raise OperationRefused(
                _("topic %(topic)s is ordered by priority: give a priority, not a time")
                % {"topic": topic.name}
            )
        return check_priority(topic, priority)
    if priority is not None or due is None:
        raise OperationRefused(
            _("topic %(topic)s is ordered by time: give a time, not a priority") % {"topic": topic.name}
        )
    return check_fixed_time(instant_ms("due", due), name="due", past=True)


def _do(
    context: OperationContext,
    act: MessageAction,
    topic: Topic,
    ids: Sequence[str],
    detail: str = "",
    *,
    keep: bool = False,
) -> ActionResult:
    """Perform an action on named messages, and record the outcomes; nothing is done if one id is invalid."""
    if len(ids) > MAX_IDS:
        raise InvalidRequest(
            _("at most %(most)s messages can be named in one request, got %(count)s")
            % {"most": MAX_IDS, "count": len(ids)}
        )
    identities = {one: identified(context, topic, one) for one in ids}
    outcomes, trash = dict.fromkeys(identities, "gone"), None
    if keep:
        named = chosen([public_id(topic, one, identity) for one, identity in identities.items()], detail)
        trash = open_trash(context, "delete", topic, named)
    at: dict[str, LocatedMessage] = {}
    unseen: set[MessageIdentity] = set()
    error: RmqError | None = None
    try:
        for find in (find_messages, find_moved):
            # A re-slotting may have moved a message that was not in the slot of its id.
            missing = {one: at.get(one, identities[one]) for one, word in outcomes.items() if word == "gone"}
            if not missing:
                break
            sought = find(context.broker, topic, missing.values(), rounds=search_rounds(context))
            unseen |= {identities[one] for one, identity in missing.items() if identity in sought.unseen}
            places = {one: sought.messages[key] for one, key in missing.items() if key in sought.messages}
            at |= places
            _act_in_slots(context, act, topic, places, outcomes, trash)
    except RmqError as failure:
        error = failure
    if trash is not None:
        trash.close()
    outcomes |= {
        one: "not_found" for one, word in outcomes.items() if word == "gone" and identities[one] in unseen
    }
    # What was done before the error is done: the audit trail gets its outcomes before the error is raised.
    if error is None or set(outcomes.values()) - {"gone", "not_found"}:
        public = [public_id(topic, one, at.get(one, identity)) for one, identity in identities.items()]
        note = chosen(public, detail or act.detail)
        record_outcomes(context, act.name, topic.name, Counter(outcomes.values()), note)
    if error is not None:
        raise error
    return ActionResult(outcomes) if trash is None else ActionResult(outcomes, trash.undo, trash.kept)


def public_id(topic: Topic, text: str, identity: MessageIdentity) -> str:
    """Return an id that reveals nothing of a message, which a person has named by the id ``text``."""
    if identity.member is not None:
        return sealed_id(topic.name, identity.slot, identity.member)
    return f"{identity.slot}~{text.partition('~')[2] or '(not found)'}"


def _act_in_slots(
    context: OperationContext,
    act: MessageAction,
    topic: Topic,
    places: Mapping[str, LocatedMessage],
    outcomes: dict[str, str],
    trash: Trash | None,
) -> None:
    """Perform the action slot by slot, and record outcomes in ``outcomes``. Raises ``RmqError``; they are right all the same."""
    by_slot: defaultdict[int, dict[bytes, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one, at in places.items():
        # If two ids name one message, the action is performed once.
        by_slot[at.slot][at.member].append(one)
    for slot, named in by_slot.items():
        words = _act_in_slot(context, act, topic, slot, list(named), trash)
        try:
            _find_states(context.broker, topic, slot, words)
        finally:
            for member, ids in named.items():
                outcomes |= dict.fromkeys(ids, words[member])


def _act_in_slot(
    context: OperationContext,
    act: MessageAction,
    topic: Topic,
    slot: int,
    members: Sequence[bytes],
    trash: Trash | None,
) -> dict[bytes, str]:
    def act_once(topic: Topic) -> list[str]:
        call = act.call(topic, slot, members)
        if trash is None:
            return context.broker.run(call)
        (answer,) = trash.run(context.broker, [call])
        if isinstance(answer, RmqError):
            raise answer
        words: list[str] = answer
        return words

    words = context.in_present_slots(topic, act_once)
    return {member: act.outcomes.get(word, word) for member, word in zip(members, words, strict=True)}


def _find_states(broker: Broker, topic: Topic, slot: int, outcomes: dict[bytes, str]) -> None:
    """Replace ``not_found`` by the state of each message.

    A replay alone keeps this word: it concerns dead messages, and the others have another state.
    """
    missing = [member for member, word in outcomes.items() if word == "not_found"]
    for first in range(0, len(missing), LOOKED_AT_ONCE):
        part = missing[first : first + LOOKED_AT_ONCE]
        reply = broker.run(inspect.describe_messages(topic, slot, part))
        outcomes |= {member: instead(one) for member, one in zip(part, reply, strict=True)}


def instead(looked: DescribeReply) -> str:
    """Return the state of a message that is not dead."""
    if looked.store is not None:
        return "waiting"
    if looked.prepare is not None or looked.claim is not None:
        return "running"
    return "resting" if looked.retry is not None else "gone"


def replay_edited(
    context: OperationContext, name: str, message_id: str, body: object, *, charged_bytes: int | None = None
) -> ActionResult:
    """Replay one dead message with another body. Outcomes: as ``replay``.

    If the body is the message's identity, the edited one is another message: it is sent, then the dead one is
    deleted. If two people do that at the same time, both messages may be sent; a double click sends one.
    ``charged_bytes``: the actor is charged with one message of this size. Raises ``InvalidMessage`` for a body that
    cannot be sent, and the errors of ``spend_sends``.
    """
    topic = context.permitted(name, *EDITED_REPLAY)
    if topic.accumulate:
        raise InvalidMessage(
            f"messages of topic {topic.name} cannot be edited, because each may hold several bodies (ACCUMULATE): "
            "replay them as they are"
        )
    encode_body(topic, body)
    at, reply = locate_message(context, topic, message_id)
    word = "gone"
    if at is not None and reply is not None:
        if reply.dead is None:
            word = instead(reply)
        else:
            if charged_bytes is not None:
                charge(context, 1, charged_bytes)
            slot, member, dead = at.slot, at.member, reply
            word = context.in_present_slots(
                topic, lambda topic: _replay_with(context, topic, slot, member, dead, body)
            )
    public = public_id(topic, message_id, at or identified(context, topic, message_id))
    record_outcomes(context, "replay edited", topic.name, {word: 1}, chosen([public], "with another body"))
    return ActionResult({message_id: word})


def _replay_with(
    context: OperationContext, topic: Topic, slot: int, member: bytes, looked: DescribeReply, body: object
) -> str:
    # Two slots may change, and no script does that in one step, so order and origin make a repetition harmless.
    (dead,) = (copy for copy in from_reply(topic, slot, member, looked) if copy.state == "dead")
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
        # While the topic is being re-slotted, the message is where either slot count places it.
        counts = {topic.slots, *connections.slots_now(topic)}
        if topic.slot_basis is None and slot not in {slot_of(member, count) for count in counts}:
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
    raw = encode_body(topic, body)
    origin = _edited_origin(topic, dead, raw) if topic.origin else None
    basis = dead.slot_basis
    if basis is not None and topic.slot_basis is not None:
        basis = check_stored_basis(basis_of_field(topic, body))
    envelope = Envelope(
        raw,
        future_expiry(dead.expires_ms, now_ms),
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
    named = [
        topic.name,
        key,
        dead.slot_basis,
        dead.score,
        dead.first_failed_ms,
        hashlib.sha256(raw).hexdigest(),
    ]
    return derived_origin(dead.at_ms or 0, f"edited {json.dumps(named)}")
