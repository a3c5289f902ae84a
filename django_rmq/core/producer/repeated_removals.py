"""Which removals are done again when a topic was re-slotted: those that found nothing, and those behind a moved send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from django_rmq.core.model.send_results import SendResult
from django_rmq.core.producer.placement import Outgoing
from django_rmq.exceptions import RmqError, SlotMoved


def found_nothing(removed: SendResult) -> bool:
    """Return whether the result of a removal says that there was no message."""
    # The words of removals are not in the type of ``status``, which is that of sends.
    return str(removed.status) == "not_found"


def missed(
    messages: Sequence[Outgoing], results: Sequence[SendResult], errors: Mapping[int, RmqError]
) -> list[int]:
    """Return the indexes of removals that found nothing, although their message may be in another slot.

    Where a later send of the same message was accepted, its slot had not moved: the removal has looked in the
    right place, and done again it would remove what was sent after it.
    """
    found: list[int] = []
    accepted: set[tuple[str, bytes]] = set()
    for index in reversed(range(len(messages))):
        out = messages[index]
        if not out.removes:
            if not isinstance(errors.get(index), SlotMoved):
                accepted.add((out.topic.name, out.member))
        elif found_nothing(results[index]) and (out.topic.name, out.member) not in accepted:
            found.append(index)
    return found


def with_later(messages: Sequence[Outgoing], moved: Iterable[int]) -> list[int]:
    """Return these indexes in order, and those of the removals that must come after them."""
    again, late, chosen = [], set(), set(moved)
    for index, out in enumerate(messages):
        if index in chosen:
            late.add((out.topic.name, out.member))
        elif not out.removes or (out.topic.name, out.member) not in late:
            continue
        again.append(index)
    return again
