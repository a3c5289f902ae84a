"""Readable and translated names of states, outcomes and reasons.

``templatetags.rmq_format`` writes times and numbers, ``body_display`` bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext_lazy

from django_rmq.core.model.schedule import Schedule

Text = str | Promise

STATES: Mapping[str, Text] = {
    "store": pgettext_lazy("state of messages", "Store"),
    "prepare": pgettext_lazy("state of messages", "Prepare"),
    "retry": pgettext_lazy("state of messages", "Retry"),
    "dead": pgettext_lazy("state of messages", "Dead"),
    "claim": pgettext_lazy("state of messages", "Claimed"),
}
PLAIN_STATES: Mapping[str, Text] = {
    "store": gettext_lazy("waiting"),
    "prepare": gettext_lazy("running"),
    "retry": gettext_lazy("resting"),
}
"""The words of the commands and of REST, where they are others than the names of the queues."""


def timing_text(schedule: Schedule) -> str:
    """Return when a schedule ticks, as people read it."""
    return (
        schedule.timing if schedule.every is None else _("every %(seconds)s s") % {"seconds": schedule.every}
    )


class StateLabel(NamedTuple):
    """How pages name a state: as the docs name its queue, and in a plain word."""

    name: str
    word: str
    """Empty if the language has the same word for both, or if there is none."""


def state_label(state: str) -> StateLabel:
    name, word = str(STATES[state]), str(PLAIN_STATES.get(state, ""))
    return StateLabel(name, "" if word == name else word)


STATE_NOTES: Mapping[str, Text] = {
    "store": gettext_lazy("Waiting for its time or its turn."),
    "prepare": gettext_lazy("Running: a consumer is processing it."),
    "retry": gettext_lazy("Resting: it failed, and waits for its next try."),
    "dead": gettext_lazy("No longer retried. It stays until someone replays or deletes it."),
    "claim": gettext_lazy("Running: a Spark query holds it until its batch is recorded or its lease ends."),
}
EMPTY: Mapping[str, Text] = {
    "store": gettext_lazy("No waiting messages."),
    "prepare": gettext_lazy("No running messages."),
    "retry": gettext_lazy("No resting messages."),
    "dead": gettext_lazy("No dead messages."),
    "claim": gettext_lazy("No claimed messages."),
}
CLAIM_STATES: Mapping[str, Text] = {
    "open": gettext_lazy("being claimed"),
    "sealed": gettext_lazy("in a batch"),
    "acked": gettext_lazy("being acknowledged"),
    "lost": gettext_lazy("lease has ended"),
    "returned": gettext_lazy("being returned"),
}
REASONS: Mapping[str, Text] = {
    "failed": gettext_lazy("failed"),
    "timed_out": gettext_lazy("timed out"),
    "overran": gettext_lazy("ran too long"),
    "undecodable": gettext_lazy("undecodable"),
    "rejected": gettext_lazy("rejected"),
    "buried": gettext_lazy("put into Dead"),
    "lapsed": gettext_lazy("lapsed"),
}
END_NAMES: Mapping[str, Text] = {
    "done": gettext_lazy("Done"),
    "removed": gettext_lazy("Removed"),
    "cancelled": gettext_lazy("Cancelled"),
    "dead": gettext_lazy("Died"),
}
MARKS: Mapping[str, Text] = {
    "removed": gettext_lazy("deleted when its delivery ends"),
    "cancelled": gettext_lazy("cancelled; its listener is notified"),
    "buried": gettext_lazy("put into Dead when its delivery ends"),
    "failed": gettext_lazy("fails when its batch ends"),
    "rejected": gettext_lazy("put into Dead when its batch ends"),
}
OUTCOMES: Mapping[str, Text] = {
    "replayed": gettext_lazy("replayed"),
    "returned": gettext_lazy("returned"),
    "merged": gettext_lazy("merged with a waiting copy"),
    "deleted": gettext_lazy("deleted"),
    "notified": gettext_lazy("running; its listener is notified"),
    "claimed": gettext_lazy("claimed by Spark"),
    "buried": gettext_lazy("put into Dead"),
    "rescheduled": gettext_lazy("rescheduled"),
    "purged": gettext_lazy("purged"),
    "paused": gettext_lazy("paused"),
    "resumed": gettext_lazy("resumed"),
    "unchanged": gettext_lazy("unchanged"),
    "running": gettext_lazy("running"),
    "waiting": gettext_lazy("already waiting"),
    "resting": gettext_lazy("already resting"),
    "dead": gettext_lazy("already dead"),
    "refused": gettext_lazy("refused"),
    "failed": gettext_lazy("failed"),
    "gone": gettext_lazy("no longer there"),
    "not_found": gettext_lazy("not found near their place; reload the list"),
    "stored": gettext_lazy("stored"),
    "present": gettext_lazy("already there, and kept"),
    "replaced": gettext_lazy("replaced"),
    "superseded": gettext_lazy("stored in place of a retry"),
    "matching": gettext_lazy("match"),
    "retried": gettext_lazy("retried"),
    "changed": gettext_lazy("changed"),
    "restored": gettext_lazy("brought back"),
    "outdated": gettext_lazy("dropped for newer copies"),
}
DID = frozenset(
    (
        *("replayed", "merged", "deleted", "buried", "rescheduled", "purged", "paused", "resumed"),
        *("stored", "replaced", "superseded", "retried", "changed", "notified", "restored"),
    )
)
"""Outcomes that changed something."""
