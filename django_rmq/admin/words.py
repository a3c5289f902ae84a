"""Readable and translated names of states, outcomes and reasons."""

from __future__ import annotations

from collections.abc import Mapping

from django.utils.formats import number_format
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext_lazy

Text = str | Promise

STATES: Mapping[str, Text] = {
    "store": pgettext_lazy("state of messages", "Store"),
    "prepare": pgettext_lazy("state of messages", "Prepare"),
    "retry": pgettext_lazy("state of messages", "Retry"),
    "dead": pgettext_lazy("state of messages", "Dead"),
    "claim": pgettext_lazy("state of messages", "Claimed"),
}
STATE_NOTES: Mapping[str, Text] = {
    "store": gettext_lazy("It waits, and is taken when its turn has come."),
    "prepare": gettext_lazy("In flight: a consumer has it."),
    "retry": gettext_lazy("It failed, and rests until it is tried again."),
    "dead": gettext_lazy("Given up, until a person replays or deletes it."),
    "claim": gettext_lazy("In flight: a Spark query holds it until its batch is recorded or its lease ends."),
}
EMPTY: Mapping[str, Text] = {
    "store": gettext_lazy("Nothing waits."),
    "prepare": gettext_lazy("Nothing is in flight."),
    "retry": gettext_lazy("Nothing rests after a failure."),
    "dead": gettext_lazy("Nothing is dead."),
    "claim": gettext_lazy("Nothing is claimed."),
}
REASONS: Mapping[str, Text] = {
    "failed": gettext_lazy("failed"),
    "timed_out": gettext_lazy("timed out"),
    "undecodable": gettext_lazy("undecodable"),
    "rejected": gettext_lazy("rejected"),
    "buried": gettext_lazy("buried"),
    "lapsed": gettext_lazy("lapsed"),
}
MARKS: Mapping[str, Text] = {
    "removed": gettext_lazy("deleted when its delivery ends"),
    "buried": gettext_lazy("dies when its delivery ends"),
}
OUTCOMES: Mapping[str, Text] = {
    "replayed": gettext_lazy("replayed"),
    "merged": gettext_lazy("merged with a waiting copy"),
    "deleted": gettext_lazy("deleted"),
    "buried": gettext_lazy("buried"),
    "rescheduled": gettext_lazy("rescheduled"),
    "purged": gettext_lazy("purged"),
    "paused": gettext_lazy("paused"),
    "resumed": gettext_lazy("resumed"),
    "unchanged": gettext_lazy("as before"),
    "in_flight": gettext_lazy("in flight"),
    "waiting": gettext_lazy("waiting already"),
    "retry": gettext_lazy("resting already"),
    "dead": gettext_lazy("dead already"),
    "refused": gettext_lazy("refused"),
    "failed": gettext_lazy("failed"),
    "gone": gettext_lazy("not there any more"),
    "not_found": gettext_lazy("not found near their place: load the list again"),
    "stored": gettext_lazy("stored"),
    "replaced": gettext_lazy("replaced"),
    "superseded": gettext_lazy("stored, in place of a retry"),
    "matching": gettext_lazy("match"),
}
DID = frozenset(
    (
        *("replayed", "merged", "deleted", "buried", "rescheduled", "purged", "paused", "resumed"),
        *("stored", "replaced", "superseded"),
    )
)
"""Outcomes that changed something."""


def outcomes_sentence(outcomes: Mapping[str, int]) -> str:
    """Return the number of messages for each outcome as a sentence: “1,200 replayed, 3 not there any more”."""
    parts = [
        _("%(count)s %(outcome)s")
        % {"count": number_format(count, force_grouping=True), "outcome": OUTCOMES.get(word, word)}
        for word, count in outcomes.items()
        if count
    ]
    return _(", ").join(parts) or _("nothing")


__all__ = ["DID", "EMPTY", "MARKS", "OUTCOMES", "REASONS", "STATES", "STATE_NOTES", "outcomes_sentence"]
