"""What an actor sees of messages: lists of them, one with all its copies, a body as it is stored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from django_rmq.core.calls import looking
from django_rmq.core.words.bounds import is_whole, shown
from django_rmq.core.words.results import SendResult
from django_rmq.core.words.topics import Topic
from django_rmq.exceptions import InvalidRequest, MessageGone, NotPermitted, OperationRefused
from django_rmq.operations.actors import Permission
from django_rmq.operations.copies import Copy, from_look
from django_rmq.operations.cursors import Order
from django_rmq.operations.desk import Desk
from django_rmq.operations.filters import Filter
from django_rmq.operations.ids import ALL_ROUNDS, ROUNDS, Found, Identity, find_members, id_of, identify
from django_rmq.operations.listing import LONGEST_PAGE, Listing, Shown, first_page_order, read_page
from django_rmq.operations.redaction import as_shown, is_withheld, may_search, require_search


def listing(
    desk: Desk,
    name: str,
    state: str,
    *,
    cursor: str = "",
    wanted: Filter | None = None,
    limit: int | None = None,
    descending: bool | None = None,
) -> Listing:
    """Return one page of the messages of a state; ``cursor``: the one that the page before came with.

    Without ``descending``, Dead begins with the last that died, Store with what is taken first. A page may be
    short, even empty, and have a cursor: then what was looked at held no more. Raises ``InvalidRequest`` for a
    cursor of another list, and what ``Filter.check`` does. Who may not see bodies gets copies without content,
    and cannot filter by text.
    """
    desk.actor.require(Permission.VIEW)
    topic = desk.present(name)
    wanted = checked(desk, topic, state, wanted)
    limit = desk.config.admin.page_size if limit is None else limit
    if not (is_whole(limit) and 1 <= limit <= LONGEST_PAGE):
        raise InvalidRequest(f"a page has 1 to {LONGEST_PAGE} messages, got {shown(limit)}")
    if descending is None:
        descending = first_page_order(topic, state)
    order = Order(topic, state, descending, wanted)
    broker, form = desk.broker, Shown(_hides(desk), not may_search(desk.actor, topic))
    found = read_page(broker, order, cursor=cursor, limit=limit, now_ms=broker.now_ms(), shown=form)
    return replace(found, copies=as_shown(desk.actor, topic, found.copies))


def checked(desk: Desk, topic: Topic, state: str, wanted: Filter | None) -> Filter:
    """Return a filter of a state that the actor may use. Raises what ``Filter.check`` and ``require_search`` do."""
    wanted = wanted or Filter()
    wanted.check(topic, state)
    if wanted.text:
        require_search(desk.actor, topic)
    return wanted


def get(desk: Desk, name: str, message_id: str) -> list[Copy]:
    """Return all copies of a message: where it waits, runs, rests, is claimed or lies dead, in this order.

    Their id is the one that was given. Raises ``MessageGone`` if there is none, ``OperationRefused`` if it was not
    found though it may be there, and ``InvalidRequest`` for what is no id.
    """
    desk.actor.require(Permission.VIEW)
    return copies_of(desk, desk.present(name), message_id)


def body(desk: Desk, name: str, message_id: str, state: str) -> bytes:
    """Return a body as it is stored: that of the copy in ``state``, or of the first one. Raises what ``get`` does."""
    desk.actor.require(Permission.VIEW, Permission.VIEW_BODIES)
    if is_withheld(desk.actor, desk.config.topic(name)):
        raise NotPermitted(f"the bodies of topic {name} are redacted")
    copies = get(desk, name, message_id)
    wanted = [copy for copy in copies if copy.state == state] or copies
    return wanted[0].raw or b""


def copies_of(desk: Desk, topic: Topic, message_id: str) -> list[Copy]:
    """Return what ``get`` does, whatever the actor may see."""
    identity, member = find_one(desk, topic, message_id)
    if member is not None:
        (looked,) = desk.broker.run(looking.look(topic, identity.slot, [member]))
        copies = list(from_look(topic, identity.slot, member, looked, message_id, hidden=_hides(desk)))
        if copies:
            return as_shown(desk.actor, topic, copies)
    raise MessageGone(f"topic {topic.name} has no message {message_id[:80]} (any more)")


def sent_id(desk: Desk, result: SendResult) -> str:
    """Return the id of a message that the actor has sent: one that ``get`` and the acts take from it."""
    desk.actor.require(Permission.SEND)
    topic = desk.config.topic(result.topic)
    sealed = not may_search(desk.actor, topic)
    return id_of(topic, result.slot, result.member, "store", result.score, sealed=sealed)


def identified(desk: Desk, topic: Topic, text: str) -> Identity:
    """Return what an id says. A plain id names nothing to an actor who may not see what is stored."""
    identity = identify(topic, text)
    if identity.member is not None and not may_search(desk.actor, topic):
        # Else a guess of a body could be made an id, and the answer would tell whether it is right.
        return Identity(identity.slot, None)
    return identity


def find(desk: Desk, topic: Topic, identities: Iterable[Identity]) -> Found:
    """Find the members that ids mean; for a command, through the whole slot."""
    rounds = ALL_ROUNDS if desk.actor.permits is None else ROUNDS
    return find_members(desk.broker, topic, identities, rounds=rounds)


def find_one(desk: Desk, topic: Topic, message_id: str) -> tuple[Identity, bytes | None]:
    """Return what one id says, and the member that it means. Raises ``OperationRefused`` if that was not found."""
    identity = identified(desk, topic, message_id)
    found = find(desk, topic, [identity])
    if identity in found.unseen:
        raise OperationRefused(not_found(message_id))
    return identity, found.members.get(identity)


def not_found(message_id: str) -> str:
    """Say that a message was not found, though it may be there."""
    return (
        f"the message {message_id[:80]} was not found near its place, nor among the last of each state of its slot. "
        "It may have moved: load the list again"
    )


def _hides(desk: Desk) -> bool:
    return not desk.actor.may(Permission.VIEW_BODIES)
