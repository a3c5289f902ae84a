"""What is known about a message, in the order in which it happened."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_rmq.admin.body_display import visible
from django_rmq.admin.labels import END_NAMES, REASONS, Text
from django_rmq.core.model.status import ENDS, MessageStatus


class TimelineStep(NamedTuple):
    """One thing that happened, or will."""

    what: Text
    at_ms: float | None
    """None: the time is not known."""
    note: Text = ""


def timeline(one: MessageStatus) -> list[TimelineStep]:
    """Return the steps of a message. What Redis does not keep is said, and not guessed."""
    steps = sorted(_known(one), key=lambda step: step.at_ms or 0)
    sent = TimelineStep(
        _("Sent"), None, _("When it was sent, and how often sends were merged, is not recorded.")
    )
    return [sent, *steps, *_coming(one)]


def _known(one: MessageStatus) -> Iterator[TimelineStep]:
    ended = one.state in ENDS
    # The last delivery of what was removed or cancelled counts, but is no failure.
    succeeded = one.state == "done" or (one.state in ("removed", "cancelled") and one.delivered is not None)
    runs = one.state.startswith("running")
    failures = one.attempts - (1 if succeeded or runs else 0)
    if one.first_failed and one.first_failed != one.last_failed:
        yield TimelineStep(_("Failed for the first time"), _ms(one.first_failed))
    if one.last_failed:
        times = ngettext("%(count)s failure in all", "%(count)s failures in all", failures) % {
            "count": failures
        }
        yield TimelineStep(
            _("Failed"), _ms(one.last_failed), f"{times}, {one.error_class}" if one.error_class else times
        )
    elif failures > 0 and ended:
        times = ngettext("%(count)s failure in all", "%(count)s failures in all", failures) % {
            "count": failures
        }
        yield TimelineStep(_("Failed"), None, f"{times}, {one.error_class}" if one.error_class else times)
    if one.delivered:
        yield TimelineStep(_("Delivered"), _ms(one.delivered), visible(one.worker))
    if one.progress_at and one.progress is not None:
        note = _("%(percent)s %% done") % {"percent": round(one.progress * 100)}
        text = visible(one.progress_text)
        yield TimelineStep(_("Progress"), _ms(one.progress_at), f"{note}: {text}" if text else note)
    if ended:
        yield TimelineStep(END_NAMES[one.state], _ms(one.ended), REASONS.get(one.reason, one.reason))


def _coming(one: MessageStatus) -> Iterator[TimelineStep]:
    if one.due:
        yield TimelineStep(_("Next delivery"), _ms(one.due))


def _ms(when: datetime | None) -> float | None:
    return None if when is None else when.timestamp() * 1000


__all__ = ["TimelineStep", "timeline"]
