"""Operations on messages that are named one by one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from django_rmq.core.calls import looking
from django_rmq.core.producer.checks import check_fixed_time, check_priority
from django_rmq.core.words.answers import Looked
from django_rmq.core.words.topics import Topic
from django_rmq.exceptions import InvalidRequest, OperationRefused, RmqError
from django_rmq.operations import acts
from django_rmq.operations.actors import Permission
from django_rmq.operations.acts import REPLAY, Act
from django_rmq.operations.desk import Desk
from django_rmq.operations.reading import copies_of, find, identified
from django_rmq.project.ids import Identity
from django_rmq.project.sealing import sealed_id

MAX_IDS = 1_000
"""Maximum number of messages named in one call."""

MOST_NAMED = 10
"""Maximum number of messages that the audit trail names for one action."""


@dataclass(frozen=True, slots=True)
class Done:
    """The outcomes of an operation on named messages."""

    found: dict[str, str]
    """Id → outcome, in the order given."""

    @property
    def outcomes(self) -> dict[str, int]:
        """Outcome → number of messages."""
        return dict(Counter(self.found.values()))


def replay(desk: Desk, name: str, ids: Sequence[str]) -> Done:
    """Send dead messages again, with their full number of retries.

    Outcomes: ``replayed``; ``merged`` (it waits already, and the dead copy is gone). If the message is not
    dead (any more), its actual state: ``waiting``, ``retry``, ``in_flight`` or ``gone``. All operations on
    named messages also have ``not_found``: the message may exist, but was not found near the place in its
    sealed id.
    """
    desk.actor.require(Permission.REPLAY)
    return _do(desk, REPLAY, desk.present(name), ids)


def delete(desk: Desk, name: str, ids: Sequence[str], copy: str) -> Done:
    """Delete messages. ``copy``: ``live`` (waiting, resting or in flight) or ``dead``.

    Outcomes: ``deleted``; ``in_flight`` (it ends with its current delivery, and is never tried again);
    ``gone`` if there is no such copy (any more).
    """
    desk.actor.require(Permission.DELETE)
    topic = desk.present(name)
    if copy not in ("live", "dead"):
        raise InvalidRequest(f"the copy must be 'live' or 'dead', got {copy!r}")
    return _do(desk, acts.delete(copy), topic, ids, f"{copy} copy")


def delete_only(desk: Desk, name: str, message_id: str) -> Done:
    """Delete the only copy of a message. Outcomes: as ``delete``; ``both``: there are two, and nothing was done."""
    desk.actor.require(Permission.DELETE)
    copies = copies_of(desk, desk.present(name), message_id)
    found = {"dead" if one.state == "dead" else "live" for one in copies}
    if len(found) > 1:
        return Done({message_id: "both"})
    return delete(desk, name, [message_id], found.pop())


def cancel(desk: Desk, name: str, ids: Sequence[str]) -> Done:
    """Delete waiting and resting messages, and notify the listeners of running ones.

    Outcomes: ``deleted``; ``notified`` (it runs, and ends as cancelled unless its listener succeeds); ``claimed``
    (a Spark consumer has it, and cannot be notified); ``gone``.
    """
    desk.actor.require(Permission.DELETE)
    return _do(desk, acts.CANCEL, desk.present(name), ids)


def bury(desk: Desk, name: str, ids: Sequence[str], why: str = "") -> Done:
    """Put messages into Dead for inspection.

    Outcomes: ``buried``, ``in_flight`` (it dies when its delivery ends), ``dead`` (it was already), ``gone``.
    """
    desk.actor.require(Permission.DELETE)
    return _do(desk, acts.bury(desk.actor, why), desk.present(name), ids)


def reschedule(
    desk: Desk,
    name: str,
    ids: Sequence[str],
    *,
    due: datetime | int | None = None,
    priority: int | None = None,
) -> Done:
    """Give waiting messages another due time (aware datetime or ms; past: at once), or another priority.

    Outcomes: ``rescheduled``; ``in_flight``; ``refused`` (a retry on a priority topic keeps its place);
    ``gone``. Raises ``OperationRefused`` for a time on a priority topic and the reverse.
    """
    desk.actor.require(Permission.EDIT)
    topic = desk.present(name)
    score = new_score(topic, due, priority)
    return _do(desk, acts.reschedule(score, is_time=not topic.is_priority), topic, ids)


def new_score(topic: Topic, due: datetime | int | None, priority: int | None) -> int:
    """Return the score of a due time or a priority. Raises ``OperationRefused`` if the topic is not ordered by it."""
    if topic.is_priority:
        if due is not None or priority is None:
            raise OperationRefused(f"topic {topic.name} is ordered by priority: give a priority, not a time")
        return check_priority(topic, priority)
    if priority is not None or due is None:
        raise OperationRefused(f"topic {topic.name} is ordered by time: give a time, not a priority")
    return check_fixed_time(due, name="due", past=True)


def _do(desk: Desk, act: Act, topic: Topic, ids: Sequence[str], detail: str = "") -> Done:
    """Perform an action on named messages, and record the outcomes; nothing is done if one id is invalid."""
    if len(ids) > MAX_IDS:
        raise InvalidRequest(f"at most {MAX_IDS} messages can be named in one request, got {len(ids)}")
    identities = {one: identified(desk, topic, one) for one in ids}
    sought = find(desk, topic, identities.values())
    members = {one: sought.members.get(identity) for one, identity in identities.items()}
    by_slot: defaultdict[int, dict[bytes, str]] = defaultdict(dict)
    for one, member in members.items():
        if member is not None:
            by_slot[identities[one].slot].setdefault(member, one)
    found = dict.fromkeys(identities, "gone")
    error = _tell(desk, act, topic, by_slot, found)
    if error is None:
        _say_where(desk, act, topic, identities, members, found)
    # If two ids name one message, it was done once.
    for one, member in members.items():
        if member is not None:
            found[one] = found[by_slot[identities[one].slot].get(member, one)]
        elif identities[one] in sought.unseen:
            found[one] = "not_found"
    if error is not None and not set(found.values()) - {"gone", "not_found"}:
        raise error
    public = [public_id(topic, one, identities[one], members[one]) for one in identities]
    desk.record(act.name, topic.name, Counter(found.values()), chosen(public, detail or act.detail))
    if error is not None:
        raise error
    return Done(found)


def chosen(ids: Sequence[str], detail: str = "") -> str:
    """Return what the audit trail says of messages that were chosen: how many, and the first ids, which are sealed."""
    more = f" and {len(ids) - MOST_NAMED} more" if len(ids) > MOST_NAMED else ""
    named = f"{len(ids)} chosen: {', '.join(ids[:MOST_NAMED])}{more}"
    return f"{named}; {detail}" if detail else named


def public_id(topic: Topic, text: str, identity: Identity, member: bytes | None) -> str:
    """Return an id that reveals nothing of a message, which somebody has named by the id ``text``."""
    member = identity.member if member is None else member
    if member is not None:
        return sealed_id(topic.name, identity.slot, member)
    return f"{identity.slot}~{text.partition('~')[2] or '(not found)'}"


def _tell(
    desk: Desk, act: Act, topic: Topic, by_slot: Mapping[int, dict[bytes, str]], found: dict[str, str]
) -> RmqError | None:
    """Perform the action slot by slot, and record outcomes in ``found``; return the error that ended it."""
    for slot, named in by_slot.items():
        try:
            words = desk.broker.run(act.call(topic, slot, list(named)))
        except RmqError as error:
            return error
        for one, word in zip(named.values(), words, strict=True):
            found[one] = act.outcomes.get(word, word)
    return None


def _say_where(
    desk: Desk,
    act: Act,
    topic: Topic,
    identities: Mapping[str, Identity],
    members: Mapping[str, bytes | None],
    found: dict[str, str],
) -> None:
    """Set the actual state of messages that were not dead (any more) as their outcomes."""
    if act is not REPLAY:
        for one, word in found.items():
            found[one] = "gone" if word == "not_found" else word
        return
    by_slot: defaultdict[int, list[str]] = defaultdict(list)
    for one, word in found.items():
        if word == "not_found":
            by_slot[identities[one].slot].append(one)
    for slot, ids in by_slot.items():
        for first in range(0, len(ids), 100):
            part = ids[first : first + 100]
            looked = desk.broker.run(looking.look(topic, slot, [members[one] or b"" for one in part]))
            found |= {one: instead(state) for one, state in zip(part, looked, strict=True)}


def instead(looked: Looked) -> str:
    """Return the state of a message that is not dead."""
    if looked.store is not None:
        return "waiting"
    if looked.prepare is not None or looked.claim is not None:
        return "in_flight"
    return "retry" if looked.retry is not None else "gone"
