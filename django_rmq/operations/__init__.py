"""What people may do with topics and messages: the one place behind the admin, the commands and REST.

An ``Operations`` belongs to an actor, checks its permissions, does things in bounded steps, and records them. Faces
translate what comes in and what goes out; they decide nothing. Whatever two persons do at once, the second one is
told what it found.

    operations = Operations(Actor.of_user(request.user, "admin"))
    for progress in operations.replay_all("orders", Filter(error="ConnectionError")):
        print(progress.done, progress.total, progress.outcomes)

Everything raises ``UnknownTopic``, ``NotPermitted`` and ``ServerTrouble``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django_rmq.core.producer.checks import check_fixed_time, check_priority
from django_rmq.core.producer.placing import score_at_once
from django_rmq.core.redis.broker import Broker
from django_rmq.core.telling import events
from django_rmq.core.words.bounds import is_whole, shown
from django_rmq.core.words.keys import slot_of
from django_rmq.core.words.messages import (
    Envelope,
    Looked,
    SendResult,
    SendResults,
    Topic,
    cut_error,
    encode_body,
    encode_envelope,
)
from django_rmq.exceptions import (
    InvalidMessage,
    InvalidRequest,
    MessageGone,
    OperationRefused,
    RmqError,
)
from django_rmq.operations import figures, health, quotas, retiring, sweeps
from django_rmq.operations.actors import Actor, Permission, Trace, record
from django_rmq.operations.copies import Copy, from_look
from django_rmq.operations.deliveries import Deliveries
from django_rmq.operations.figures import (
    Flow,
    Measured,
    Measurement,
    Overview,
    SlotFigures,
    SlotsFigures,
    TopicFigures,
    WorkerFigures,
)
from django_rmq.operations.health import Health
from django_rmq.operations.ids import (
    ALL_ROUNDS,
    ROUNDS,
    STATES,
    Found,
    Identity,
    find_members,
    id_of,
    identify,
)
from django_rmq.operations.listing import (
    LONGEST_PAGE,
    Filter,
    Listing,
    Order,
    Shown,
    first_page_order,
    read_page,
)
from django_rmq.operations.redaction import is_redacted, may_search, redacted, require_search
from django_rmq.operations.retiring import Stranded
from django_rmq.operations.sweeps import Limits, Progress, Run
from django_rmq.project import connections, sending
from django_rmq.project.settings import Config, get_config
from django_rmq.project.watching import announcing

MAX_IDS = 1_000
"""Messages that may be named one by one in one call."""

EVENTS_SECONDS = 0.5
"""How long one look for events waits for the first."""

_PURGED = ("store", "retry", "dead")
_BOTH_LIVE = "in_flight_and_waiting"


@dataclass(frozen=True, slots=True)
class Done:
    """What came of an act on named messages."""

    found: dict[str, str]
    """Id → outcome, in the order given."""

    @property
    def outcomes(self) -> dict[str, int]:
        """Outcome → how many."""
        return dict(Counter(self.found.values()))


class Operations:
    """Everything that ``actor`` may see and do. ``purpose`` says whose connections to use.

    ``trace``: what is done is one action of several requests, and recorded as one.
    """

    def __init__(
        self,
        actor: Actor,
        purpose: connections.Purpose = "web",
        *,
        broker: Broker | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.actor = actor
        self._trace = trace
        self._purpose = purpose
        self._given = broker

    @property
    def broker(self) -> Broker:
        """The broker that is asked."""
        return self._given if self._given is not None else connections.get_broker(self._purpose)

    @property
    def config(self) -> Config:
        """The settings."""
        return get_config()

    # --- looking

    def overview(self, names: Iterable[str] | None = None) -> list[TopicFigures]:
        """Return the figures of all topics (or those named), in the order of the settings, in one round trip."""
        return self.survey(names).topics

    def survey(self, names: Iterable[str] | None = None) -> Overview:
        """Return what ``overview`` does, and how many workers there are."""
        self.actor.require(Permission.VIEW)
        return figures.survey(self.broker, self._topics(names))

    def topic(self, name: str) -> TopicFigures:
        """Return the figures of one topic."""
        (found,) = self.overview([name])
        return found

    def slots(self, name: str, first: int = 0, limit: int = 1_000) -> SlotsFigures:
        """Return up to ``limit`` slots from ``first``: what each holds, and who owns it since when."""
        self.actor.require(Permission.VIEW)
        topic = self._topic(name)
        wanted = range(max(0, first), min(topic.slots, max(0, first) + max(1, min(limit, 5_000))))
        return figures.slots(self.broker, topic, wanted)

    def flow(self, names: Iterable[str] | None = None) -> Flow:
        """Return what has passed through topics so far; ask twice for rates. Not for those of very many slots."""
        self.actor.require(Permission.VIEW)
        return figures.flow(self.broker, self._topics(names))

    def measured(self, names: Iterable[str] | None = None) -> Measurement:
        """Return what monitoring systems want to know of topics: depths, counts since the first message, durations."""
        self.actor.require(Permission.VIEW)
        return figures.measured(self.broker, self._topics(names))

    def workers(self) -> list[WorkerFigures]:
        """Return all live workers, and how many slots of which topics each has."""
        self.actor.require(Permission.VIEW)
        return figures.workers(self.broker)

    def listing(
        self,
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
        self.actor.require(Permission.VIEW)
        topic = self._topic(name)
        wanted = self._filter(topic, state, wanted)
        limit = self.config.admin.page_size if limit is None else limit
        if not (is_whole(limit) and 1 <= limit <= LONGEST_PAGE):
            raise InvalidRequest(f"a page has 1 to {LONGEST_PAGE} messages, got {shown(limit)}")
        if descending is None:
            descending = first_page_order(topic, state)
        order = Order(topic, state, descending, wanted)
        broker, form = self.broker, Shown(self._hidden, self._seals(topic))
        found = read_page(broker, order, cursor=cursor, limit=limit, now_ms=broker.now_ms(), shown=form)
        return replace(found, copies=self._as_shown(topic, found.copies))

    def get(self, name: str, message_id: str) -> list[Copy]:
        """Return all copies of a message: where it waits, runs, rests, is claimed or lies dead, in this order.

        Their id is the one that was given. Raises ``MessageGone`` if there is none, ``OperationRefused`` if it was not
        found though it may be there, and ``InvalidRequest`` for what is no id.
        """
        self.actor.require(Permission.VIEW)
        return self._copies(self._topic(name), message_id)

    def _copies(self, topic: Topic, message_id: str) -> list[Copy]:
        identity, member = self._find_one(topic, message_id)
        if member is not None:
            (looked,) = self.broker.look(topic, identity.slot, [member])
            copies = list(from_look(topic, identity.slot, member, looked, message_id, hidden=self._hidden))
            if copies:
                return self._as_shown(topic, copies)
        raise MessageGone(f"topic {topic.name} has no message {message_id[:80]} (any more)")

    def sent_id(self, result: SendResult) -> str:
        """Return the id of a message that the actor has sent: one that ``get`` and the acts take from it."""
        self.actor.require(Permission.SEND)
        topic = self.config.topic(result.topic)
        return id_of(topic, result.slot, result.member, "store", result.score, sealed=self._seals(topic))

    def health(
        self, limits: health.Limits, names: Iterable[str] | None = None, *, patience: float = 0.0
    ) -> Health:
        """Look whether all is well with topics (or those named); Redis being away is a finding, not an error."""
        self.actor.require(Permission.VIEW)
        topics = self._topics(names)
        left = self.stranded if names is None else list
        return health.check(
            self.broker, topics, self.config.coordinator, limits, patience=patience, stranded=left
        )

    def stranded(self) -> list[Stranded]:
        """Return the topics that are registered in Redis and that the settings do not declare, with what they hold."""
        self.actor.require(Permission.VIEW)
        return retiring.stranded(self.broker, self.config.topics)

    def find_stranded(self, name: str) -> Stranded:
        """Return one of these topics. Raises ``OperationRefused`` if it is declared, unknown or being re-slotted."""
        self.actor.require(Permission.VIEW)
        return retiring.find(self.broker, self.config.topics, name)

    def retire(self, name: str, *, to: str | None = None, delete: bool = False, dead: str = "") -> Run:
        """Move the messages of a topic that is not declared to the topic ``to``, or delete them; then forget the topic.

        ``dead``: what becomes of dead messages that are not to be deleted with the others: ``move`` (they are sent to
        ``to`` like new ones) or ``delete``. Outcomes: those of sends, ``purged``, ``kept`` (they have no slot in ``to``, or
        it is full; the topic stays) and ``retired``. Raises ``OperationRefused`` where messages are in flight or dead, or
        anything is there without ``to`` and ``delete``.
        """
        self.actor.require(Permission.PURGE, *((Permission.SEND, Permission.EDIT) if to else ()))
        found = retiring.find(self.broker, self.config.topics, name)
        target = None if to is None else self._topic(to)
        steps = retiring.retire(
            self.broker, connections.get_producer, found, target, delete=delete, dead=dead
        )
        return self._recorded("retire", found.topic, f"to {to}" if to else "", steps)

    def events(self) -> Iterator[list[dict[str, Any]]]:
        """Yield what happens from now on, see ``django_rmq.events``; empty lists while nothing does, to be asked again.

        Ids hold what is stored, so it takes the right to see bodies. Raises ``OperationRefused`` where EVENTS is off,
        and ``ServerTrouble`` when the connection is lost.
        """
        self.actor.require(Permission.VIEW, Permission.VIEW_BODIES)
        if not self.config.events:
            raise OperationRefused('RMQ["EVENTS"] is off: nobody tells what happens')
        return _heard(self.broker)

    # --- sending

    def send(self, name: str, body: Any, **options: Any) -> SendResult:
        """Send one message at once; ``options`` are those of ``send_message``. Raises what that does."""
        self.actor.require(Permission.SEND)
        result = sending.send_message(name, body, on_commit=False, **options)
        record(self.actor, "send", name, {result.status: 1})
        return result

    def send_many(self, name: str, bodies: Sequence[Any], **options: Any) -> dict[str, int]:
        """Send many messages at once; return how many have which status. Nothing is sent if one cannot be."""
        self.actor.require(Permission.SEND)
        results = sending.send_messages(name, bodies, on_commit=False, **options)
        outcomes = dict(results.counts())
        record(self.actor, "send", name, outcomes)
        return outcomes

    def send_each(self, name: str, sends: Sequence[sending.Send]) -> SendResults:
        """Send messages with options of their own at once, for a program; return what became of each.

        As ``send_many``; it leaves no LogEntry.
        """
        self.actor.require(Permission.SEND)
        results = sending.send_messages(name, list(sends), on_commit=False)
        record(self.actor, "send", name, dict(results.counts()), entry=False)
        return results

    def spend_sends(self, messages: int, size: int) -> None:
        """Charge the actor with so many messages, of ``size`` bytes in all, as ``RMQ["API"]`` limits them.

        Raises ``TooManySends``, and ``InvalidRequest`` for more at once than can ever be had.
        """
        self.actor.require(Permission.SEND)
        rates = {"messages": (messages, self.config.api.rate), "bytes": (size, self.config.api.byte_rate)}
        quotas.spend(self.broker, self.actor, _charges(rates))

    def once(self, key: str, content: Any, messages: int) -> AbstractContextManager[quotas.Once]:
        """Let a send of so many messages that the actor names by ``key`` be done once; see ``quotas.once``."""
        self.actor.require(Permission.SEND)
        kept = {"messages with an Idempotency-Key": (messages, self.config.api.once_rate)}
        return quotas.once(self.broker, self.actor, key, content, _charges(kept))

    # --- consuming

    def deliveries(self, name: str) -> Deliveries:
        """Return the two phases of consuming a topic. Raises ``TopicMismatch`` as a worker would."""
        self.actor.require(Permission.CONSUME)
        declared = self.config.topic(name)
        if self._given is None:
            connections.agree(declared)
        return Deliveries(self.actor, self._topic(name), self.broker)

    # --- acts on named messages

    def replay(self, name: str, ids: Sequence[str]) -> Done:
        """Send dead messages again, with their full budget of retries.

        Outcomes: ``replayed``; ``merged`` (it waits already, and the dead copy is gone); where it is not dead (any
        more), what it is instead: ``waiting``, ``retry``, ``in_flight`` or ``gone``. Of all acts on named messages:
        ``not_found``, where it may be there, but was not found near the place that a sealed id says.
        """
        self.actor.require(Permission.REPLAY)
        topic = self._topic(name)

        def tell(pipeline: Any, slot: int, members: list[bytes]) -> None:
            pipeline.replay(topic, slot, members)

        return self._act("replay", topic, ids, tell, {})

    def replay_edited(self, name: str, message_id: str, body: Any) -> Done:
        """Replay one dead message with another body. Outcomes: as ``replay``.

        Where the body is the message's identity, the edited one is another message: it is sent, then the dead one is
        deleted. Of two persons who do that at once both may have sent theirs; a double click sends one.
        Raises ``InvalidMessage`` for a body that cannot be sent.
        """
        self.actor.require(Permission.REPLAY, Permission.EDIT)
        topic = self._topic(name)
        encode_body(topic, body)
        identity, member = self._find_one(topic, message_id)
        word = "gone"
        if member is not None:
            (looked,) = self.broker.look(topic, identity.slot, [member])
            if looked.dead is None:
                word = _instead(looked)
            else:
                word = self._replay_edited(topic, identity.slot, member, looked, body)
        self._record("replay edited", topic.name, {word: 1})
        return Done({message_id: word})

    def delete(self, name: str, ids: Sequence[str], copy: str) -> Done:
        """Delete messages; ``copy``: ``live`` (waiting, resting or in flight) or ``dead``.

        Outcomes: ``deleted``; ``in_flight`` (it runs, and ends with its delivery, never to be tried again); where
        there is no such copy (any more) ``gone``.
        """
        self.actor.require(Permission.DELETE)
        topic = self._topic(name)
        if copy not in ("live", "dead"):
            raise InvalidRequest(f"delete which copy: live or dead? Got {copy!r}")

        def tell(pipeline: Any, slot: int, members: list[bytes]) -> None:
            pipeline.remove(topic, slot, members, copy)

        return self._act("delete", topic, ids, tell, _DELETED)

    def delete_only(self, name: str, message_id: str) -> Done:
        """Delete the only copy of a message. Outcomes: as ``delete``; ``both``: there are two, and nothing was done."""
        self.actor.require(Permission.DELETE)
        copies = self._copies(self._topic(name), message_id)
        found = {"dead" if one.state == "dead" else "live" for one in copies}
        if len(found) > 1:
            return Done({message_id: "both"})
        return self.delete(name, [message_id], found.pop())

    def bury(self, name: str, ids: Sequence[str], why: str = "") -> Done:
        """Put messages into Dead, to be looked at. Outcomes: ``buried``, ``in_flight`` (it dies when its delivery
        ends), ``dead`` (it was already), ``gone``."""
        self.actor.require(Permission.DELETE)
        topic = self._topic(name)
        reason = self._reason(why)

        def tell(pipeline: Any, slot: int, members: list[bytes]) -> None:
            pipeline.bury(topic, slot, members, reason)

        return self._act("bury", topic, ids, tell, _BURIED)

    def reschedule(
        self,
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
        self.actor.require(Permission.EDIT)
        topic = self._topic(name)
        score = _new_score(topic, due, priority)

        def tell(pipeline: Any, slot: int, members: list[bytes]) -> None:
            pipeline.reschedule(topic, slot, [score] * len(members), members)

        return self._act("reschedule", topic, ids, tell, _RESCHEDULED)

    # --- acts on many messages

    def replay_all(
        self,
        name: str,
        wanted: Filter | None = None,
        *,
        limits: Limits | None = None,
        dry_run: bool = False,
    ) -> Run:
        """Replay all dead messages that ``wanted`` means, slots in turns. Outcomes: ``replayed``, ``merged``, ``gone``.

        ``dry_run``: only count them (``matching``).
        """
        self.actor.require(Permission.REPLAY)
        topic = self._topic(name)

        def tell(pipeline: Any, slot: int, members: Sequence[bytes]) -> None:
            pipeline.replay(topic, slot, members)

        return self._sweep("replay all", topic, "dead", wanted, tell, {}, limits, dry_run)

    def delete_all(
        self,
        name: str,
        state: str,
        wanted: Filter | None = None,
        *,
        limits: Limits | None = None,
        dry_run: bool = False,
    ) -> Run:
        """Delete all messages of a state that ``wanted`` means. Outcomes: ``deleted``, ``in_flight``, ``gone``."""
        self.actor.require(Permission.DELETE)
        topic = self._topic(name)

        def tell(pipeline: Any, slot: int, members: Sequence[bytes]) -> None:
            pipeline.remove(topic, slot, members, "dead" if state == "dead" else "live")

        return self._sweep("delete all", topic, state, wanted, tell, _DELETED, limits, dry_run)

    def bury_all(
        self,
        name: str,
        state: str,
        wanted: Filter | None = None,
        *,
        why: str = "",
        limits: Limits | None = None,
        dry_run: bool = False,
    ) -> Run:
        """Bury all messages of a state that ``wanted`` means. Outcomes: ``buried``, ``in_flight``, ``gone``."""
        self.actor.require(Permission.DELETE)
        topic = self._topic(name)
        if state == "dead":
            raise OperationRefused("what is dead is buried already")
        reason = self._reason(why)

        def tell(pipeline: Any, slot: int, members: Sequence[bytes]) -> None:
            pipeline.bury(topic, slot, members, reason)

        return self._sweep("bury all", topic, state, wanted, tell, _BURIED, limits, dry_run)

    def purge(
        self,
        name: str,
        state: str,
        *,
        older_than: float | None = None,
        slot: int | None = None,
        limits: Limits | None = None,
        dry_run: bool = False,
    ) -> Run:
        """Empty a state of a topic (store, retry or dead), without looking at the messages. Outcome: ``purged``.

        ``older_than``: only what has been due, or dead, for so many seconds; waiting retries have no time and stay.
        What is in flight is never purged. Raises ``OperationRefused`` where messages hold no time.
        """
        self.actor.require(Permission.PURGE)
        topic = self._topic(name)
        if state not in _PURGED:
            raise OperationRefused(
                f"cannot purge {state!r}: only {', '.join(_PURGED)}. What is in flight ends with its delivery"
            )
        wanted = Filter(older_than=older_than, slot=slot)
        wanted.check(topic, state)
        limits = limits or Limits()
        limits.check()
        steps = sweeps.purge(self.broker, topic, state, wanted, limits=limits, dry_run=dry_run)
        return Run(steps) if dry_run else self._recorded("purge", topic, state, steps)

    def pause(self, name: str) -> Run:
        """Stop handing out messages of a topic, until ``resume``. What runs comes to its end. Counts slots.

        Outcomes: ``paused``, ``unchanged``. Every worker is answered so by Redis at its next prepare.
        """
        return self._pause(name, True)

    def resume(self, name: str) -> Run:
        """Go on with a paused topic; its workers are woken. Outcomes, of slots: ``resumed``, ``unchanged``."""
        return self._pause(name, False)

    def _pause(self, name: str, paused: bool) -> Run:
        self.actor.require(Permission.PAUSE)
        topic = self._topic(name)

        def tell(pipeline: Any, slot: int) -> None:
            pipeline.pause(topic, slot, paused)

        steps = sweeps.tell_every_slot(self.broker, topic, tell)
        return self._recorded("pause" if paused else "resume", topic, "slots", steps)

    # --- what they have in common

    @property
    def _hidden(self) -> bool:
        return not self.actor.may(Permission.VIEW_BODIES)

    def _reason(self, why: str) -> str:
        """Return what is kept of a burial: the words of a person, which are not to be taken for the class of an error."""
        return cut_error(f"buried by {self.actor.name}{f': {why}' if why else ''}").decode()

    def _as_shown(self, topic: Topic, copies: list[Copy]) -> list[Copy]:
        """Return copies as the topic's formatter lets people see them; a shell sees what is stored."""
        if self.actor.permits is None or not is_redacted(topic):
            return copies
        return [redacted(copy) for copy in copies]

    def _topic(self, name: str) -> Topic:
        """Return a topic with the slots that it has by now, whatever the settings say."""
        return connections.present(self.config.topic(name), self._given)

    def _topics(self, names: Iterable[str] | None) -> list[Topic]:
        return [self._topic(name) for name in (self.config.topics if names is None else names)]

    def _filter(self, topic: Topic, state: str, wanted: Filter | None) -> Filter:
        wanted = wanted or Filter()
        wanted.check(topic, state)
        if wanted.text:
            require_search(self.actor, topic)
        return wanted

    def _seals(self, topic: Topic) -> bool:
        """Return whether the ids that the actor gets must not hold the message, as those that it gives must not."""
        return not may_search(self.actor, topic)

    def _identify(self, topic: Topic, text: str) -> Identity:
        """Return what an id says. A plain id names nothing to an actor who may not see what is stored."""
        identity = identify(topic, text)
        if identity.member is not None and self._seals(topic):
            # Else a guess of a body could be made an id, and the answer would tell whether it is right.
            return Identity(identity.slot, None)
        return identity

    def _find(self, topic: Topic, identities: Iterable[Identity]) -> Found:
        rounds = ALL_ROUNDS if self.actor.permits is None else ROUNDS
        return find_members(self.broker, topic, identities, rounds=rounds)

    def _find_one(self, topic: Topic, message_id: str) -> tuple[Identity, bytes | None]:
        """Return what one id says, and the member that it means. Raises ``OperationRefused`` if that was not found."""
        identity = self._identify(topic, message_id)
        found = self._find(topic, [identity])
        if identity in found.unseen:
            raise OperationRefused(not_found(message_id))
        return identity, found.members.get(identity)

    def _act(
        self,
        act: str,
        topic: Topic,
        ids: Sequence[str],
        tell: Callable[[Any, int, list[bytes]], None],
        outcomes: Mapping[str, str],
    ) -> Done:
        """Do something to named messages, and record what came of it; nothing is done if one id is none."""
        if len(ids) > MAX_IDS:
            raise InvalidRequest(f"at most {MAX_IDS} messages can be named at once, got {len(ids)}")
        identities = {one: self._identify(topic, one) for one in ids}
        sought = self._find(topic, identities.values())
        members = {one: sought.members.get(identity) for one, identity in identities.items()}
        by_slot: defaultdict[int, dict[bytes, str]] = defaultdict(dict)
        found = dict.fromkeys(identities, "gone")
        for one, member in members.items():
            if member is not None:
                by_slot[identities[one].slot].setdefault(member, one)
        error: RmqError | None = None
        for slot, named in by_slot.items():
            pipeline = self.broker.pipeline()
            tell(pipeline, slot, list(named))
            (answer,) = pipeline.execute()
            if isinstance(answer, RmqError):
                error = answer
                break
            words = {one: outcomes.get(word, word) for one, word in zip(named.values(), answer, strict=True)}
            found |= words
        if error is None:
            self._say_where(topic, act, identities, members, found)
        # Two ids may name one message: it was done once.
        for one, member in members.items():
            if member is not None:
                found[one] = found[by_slot[identities[one].slot].get(member, one)]
            elif identities[one] in sought.unseen:
                found[one] = "not_found"
        if error is not None and not set(found.values()) - {"gone", "not_found"}:
            raise error
        self._record(act, topic.name, Counter(found.values()), f"{len(ids)} chosen")
        if error is not None:
            raise error
        return Done(found)

    def _record(self, act: str, topic: str, outcomes: Mapping[str, int], note: str = "") -> None:
        record(self.actor, act, topic, outcomes, note, trace=self._trace)
        done = {word: outcomes[word] for word in ("replayed", "merged") if outcomes.get(word)}
        if act.startswith("replay") and done:
            announcing.replayed(topic, done, self.actor.name)

    def _say_where(
        self,
        topic: Topic,
        act: str,
        identities: Mapping[str, Identity],
        members: Mapping[str, bytes | None],
        found: dict[str, str],
    ) -> None:
        """Say of messages that were not dead (any more) what they are instead."""
        if act != "replay":
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
                looked = self.broker.look(topic, slot, [members[one] or b"" for one in part])
                found |= {one: _instead(state) for one, state in zip(part, looked, strict=True)}

    def _replay_edited(self, topic: Topic, slot: int, member: bytes, looked: Looked, body: Any) -> str:
        """Replay one dead message with another body; return the outcome."""
        (dead,) = (copy for copy in from_look(topic, slot, member, looked) if copy.state == "dead")
        producer = connections.get_producer()
        broker = self.broker
        if topic.keyed:
            try:
                key = member.decode()
            except UnicodeDecodeError:
                raise InvalidMessage("the key is not UTF-8: such a message cannot be edited") from None
            basis = dead.slot_basis if topic.slot_basis is None else None
            envelope = _edited(topic, looked, dead, body, broker.now_ms())
            outgoing = producer.outgoing(
                topic, body, self._score_at_once(topic, dead), envelope, key=key, slot_basis=basis
            )
            if outgoing.slot == slot or topic.slot_basis is None:
                (word,) = broker.replay(topic, slot, [member], [envelope])
                return "gone" if word == "not_found" else word
        else:
            outgoing = producer.outgoing(topic, body, self._score_at_once(topic, dead))
            if topic.slot_basis is None and slot != slot_of(member, topic.slots):
                # It was sent with a slot basis of its own, which nobody knows any more.
                outgoing = outgoing._replace(slot=slot, crc=None)
            if outgoing.member == member:
                (word,) = broker.replay(topic, slot, [member])
                return "gone" if word == "not_found" else word
        sent = sending.send_outgoing(outgoing, body)
        broker.remove(topic, slot, [member], "dead")
        return "merged" if sent.status in ("merged", "replaced") else "replayed"

    def _score_at_once(self, topic: Topic, dead: Copy) -> int:
        """Return what lets a message be taken at once, or with the priority that it had."""
        return score_at_once(topic, dead.scored, self.broker.now_ms())

    def _sweep(
        self,
        act: str,
        topic: Topic,
        state: str,
        wanted: Filter | None,
        tell: Callable[[Any, int, Sequence[bytes]], None],
        outcomes: Mapping[str, str],
        limits: Limits | None,
        dry_run: bool,
    ) -> Run:
        wanted = self._filter(topic, state, wanted)
        limits = limits or Limits()
        limits.check()
        told = None if dry_run else tell
        steps = sweeps.sweep(self.broker, topic, state, wanted, told, limits=limits)
        renamed = (_renamed(progress, outcomes) for progress in steps)
        return Run(renamed) if dry_run else self._recorded(act, topic, state, renamed)

    def _recorded(self, act: str, topic: Topic, what: str, steps: Iterator[Progress]) -> Run:
        """Return a run that is recorded when it ends, however that comes."""

        def recorded() -> Iterator[Progress]:
            last: Progress | None = None
            try:
                for last in steps:
                    yield last
            finally:
                if last is not None:
                    note = what if last.is_complete else f"{what}, not to the end"
                    self._record(act, topic.name, last.outcomes, note)

        return Run(recorded())


_DELETED = {
    "waiting": "deleted",
    "retry": "deleted",
    "dead": "deleted",
    _BOTH_LIVE: "in_flight",
    "not_found": "gone",
}
_BURIED = {"waiting": "buried", "retry": "buried", _BOTH_LIVE: "in_flight", "not_found": "gone"}
_RESCHEDULED = {"waiting": "rescheduled", "retry": "rescheduled", "not_found": "gone"}


def _charges(rates: Mapping[str, tuple[int, tuple[int, float] | None]]) -> list[quotas.Charge]:
    """Return what is charged where there is a rate, and anything to be charged."""
    return [quotas.Charge(what, wanted, *rate) for what, (wanted, rate) in rates.items() if rate and wanted]


def _heard(broker: Broker) -> Iterator[list[dict[str, Any]]]:
    subscription = broker.events()
    try:
        while True:
            payloads = subscription.get(EVENTS_SECONDS)
            yield [event for payload in payloads for event in events.read(payload)]
    finally:
        subscription.close()


def _renamed(progress: Progress, outcomes: Mapping[str, str]) -> Progress:
    renamed: Counter[str] = Counter()
    for word, count in progress.outcomes.items():
        renamed[outcomes.get(word, "gone" if word == "not_found" else word)] += count
    return Progress(progress.done, progress.total, dict(renamed), progress.is_complete, progress.problems)


def _instead(looked: Looked) -> str:
    """Return what a message is that is not dead."""
    if looked.store is not None:
        return "waiting"
    if looked.prepare is not None or looked.claim is not None:
        return "in_flight"
    return "retry" if looked.retry is not None else "gone"


def _edited(topic: Topic, looked: Looked, dead: Copy, body: Any, now_ms: int) -> bytes:
    """Return the envelope of a keyed message with another body; an expiry that has passed is dropped."""
    expires_ms = dead.expires_ms if dead.expires_ms > now_ms else 0
    envelope = Envelope(encode_body(topic, body), expires_ms, dead.slot_basis, dead.headers or None)
    return encode_envelope(envelope)


def not_found(message_id: str) -> str:
    """Say that a message was not found, though it may be there."""
    return (
        f"the message {message_id[:80]} was not found near its place, nor among the last of each state of its slot. "
        "It may have moved: load the list again"
    )


def _new_score(topic: Topic, due: datetime | int | None, priority: int | None) -> int:
    if topic.is_priority:
        if due is not None or priority is None:
            raise OperationRefused(f"topic {topic.name} orders by priority: give a priority, not a time")
        return check_priority(topic, priority)
    if priority is not None or due is None:
        raise OperationRefused(f"topic {topic.name} orders by time: give a time, not a priority")
    return check_fixed_time(due, name="due", past=True)


__all__ = [
    "STATES",
    "Actor",
    "Copy",
    "Deliveries",
    "Done",
    "Filter",
    "Flow",
    "Health",
    "Identity",
    "Limits",
    "Listing",
    "Measured",
    "Measurement",
    "Operations",
    "Overview",
    "Permission",
    "Progress",
    "Run",
    "SlotFigures",
    "SlotsFigures",
    "Stranded",
    "TopicFigures",
    "Trace",
    "WorkerFigures",
    "identify",
    "not_found",
]
