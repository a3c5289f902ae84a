"""A table of the actions on messages from a page: the words, the question with its form, and the operation of each.

``action_views`` asks the question and runs the action. Only what a page offers is decided here: which actions, for messages of
which state and filter. Permissions, what is refused, outcomes and the audit are those of ``django_rmq.operations``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django import forms
from django.http import QueryDict
from django.utils.formats import number_format
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from django_rmq.admin.forms import TYPED_TIME, TypedTimeField
from django_rmq.admin.labels import STATES, Text
from django_rmq.core.model.bounds import MAX_PRIORITY
from django_rmq.core.model.stored_actions import ActionKind
from django_rmq.core.model.topic import Topic
from django_rmq.operations import ActionResult, BulkRun, Filter, Operations, Permission
from django_rmq.operations.authorization import PERMISSION_OF
from django_rmq.operations.bulk_actions import FASTEST_RATE
from django_rmq.operations.filters import is_for_purge


class QuestionForm(forms.Form):
    """A form without fields, for a plain confirmation."""

    def __init__(self, topic: Topic, state: str, data: QueryDict | None = None) -> None:
        super().__init__(data, auto_id="rmq-%s", label_suffix="")
        self.topic = topic
        self.state = state
        self.prepare()

    def prepare(self) -> None:
        """Choose the fields that apply to this topic and state."""


class BuryForm(QuestionForm):
    """Why a message is put into Dead by hand."""

    why = forms.CharField(
        label=gettext_lazy("Reason"),
        required=False,
        max_length=500,
        help_text=gettext_lazy("Shown as the error of the dead messages."),
    )


class RateForm(QuestionForm):
    """The speed at which many messages are replayed."""

    rate = forms.IntegerField(
        label=gettext_lazy("Messages per second"),
        required=False,
        min_value=1,
        max_value=FASTEST_RATE,
        help_text=gettext_lazy("Leave empty for no limit."),
    )


class RescheduleForm(QuestionForm):
    """When, or with which priority, waiting messages are taken."""

    due = TypedTimeField(label=gettext_lazy("Due"), help_text=gettext_lazy("A time in the past means now."))

    def prepare(self) -> None:
        if self.topic.is_priority:
            del self.fields["due"]
            self.fields["priority"] = forms.IntegerField(
                label=_("Priority"),
                min_value=self.topic.min_priority,
                max_value=MAX_PRIORITY,
                help_text=_("The highest number is delivered first."),
            )


class DeleteForm(QuestionForm):
    """Whether deleted messages are kept for a while."""

    for_good = forms.BooleanField(
        label=gettext_lazy("Free the memory at once: the messages cannot be brought back then."),
        required=False,
    )


class PurgeForm(DeleteForm):
    """The name of the topic, as a confirmation."""

    field_order = ("name", "for_good")

    name = forms.CharField(
        label=gettext_lazy("Name of the topic"), help_text=gettext_lazy("Type the name to confirm.")
    )

    def prepare(self) -> None:
        self.fields["name"].widget.attrs |= {"autocomplete": "off", "spellcheck": "false"}

    def clean_name(self) -> str:
        name = str(self.cleaned_data["name"])
        if name != self.topic.name:
            raise forms.ValidationError(_("This is not the name of the topic."))
        return name


@dataclass(frozen=True, slots=True)
class Chosen:
    """The messages or the topic of an action."""

    topic: Topic
    state: str
    ids: Sequence[str] = ()
    wanted: Filter = field(default_factory=Filter)
    answers: Mapping[str, object] | None = None
    """The answers of the question's form."""

    def answer(self, name: str) -> Any:
        return (self.answers or {}).get(name)

    @property
    def keep(self) -> bool:
        """Whether deleted messages can be brought back."""
        return not self.answer("for_good")

    @property
    def why(self) -> str:
        """Why messages are put into Dead."""
        return self.answer("why") or ""

    @property
    def new(self) -> dict[str, Any]:
        """The new due time or priority."""
        return {name: self.answer(name) for name in ("due", "priority")}

    @property
    def answered(self) -> list[tuple[str, str]]:
        """The answers in the form in which a page carries them on."""
        given = ((name, value) for name, value in (self.answers or {}).items() if value not in (None, ""))
        return [
            (name, f"{localtime(value):{TYPED_TIME}}" if isinstance(value, datetime) else str(value))
            for name, value in given
        ]


@dataclass(frozen=True, slots=True)
class PageAction:
    """An action on named messages (``named``), or on all that match (``sweep``)."""

    name: str
    label: Text
    text: Text
    """The question before it is done."""
    states: tuple[str, ...]
    form: type[QuestionForm] = QuestionForm
    named: Callable[[Operations, Chosen], ActionResult] | None = None
    sweep: Callable[..., BulkRun] | None = None
    """It gets the operations, what is chosen, and the bounds of the run: ``limits`` and ``dry_run``."""
    is_danger: bool = False
    always_asks: bool = False
    """Whether it asks even for a single message."""
    for_filtered: bool | None = None
    """True: only for a filtered list. False: only without a filter (except for age and slot). None: both."""
    for_priorities: bool = True
    """Whether it applies to resting messages of a priority topic. ``reschedule`` of ``lua/slot/operate.lua`` refuses them."""

    background: ActionKind | None = None
    """The same action in the background, if there is one."""

    @property
    def permission(self) -> Permission:
        """The permission that it requires."""
        return PERMISSION_OF[self.name.removesuffix("_all")]

    @property
    def keeps(self) -> bool:
        """Whether what it deletes can be brought back."""
        return issubclass(self.form, DeleteForm)

    def fits(self, topic: Topic, state: str) -> bool:
        """Return whether it applies to messages of this state."""
        if state not in self.states:
            return False
        return self.for_priorities or not (topic.is_priority and state == "retry")

    def fits_filter(self, wanted: Filter) -> bool:
        """Return whether it applies to messages selected by this filter."""
        if self.for_filtered is None:
            return True
        # A purge would take messages that another condition does not select.
        return self.for_filtered != is_for_purge(wanted)

    def question(self, chosen: Chosen, count: int, is_exact: bool) -> str:
        """Return the question before it is done to ``count`` messages."""
        number = number_format(count, force_grouping=True)
        if not is_exact:
            number = _("at least %(number)s") % {"number": number}
        given = {"number": number, "topic": chosen.topic.name, "state": STATES[chosen.state]}
        return str(self.text % {**given, "count": count})


ACTS: Mapping[str, PageAction] = {
    act.name: act
    for act in (
        PageAction(
            "replay",
            gettext_lazy("Replay"),
            ngettext_lazy(
                "Replay %(number)s message of %(topic)s?", "Replay %(number)s messages of %(topic)s?", "count"
            ),
            ("dead",),
            named=lambda operations, chosen: operations.replay(chosen.topic.name, chosen.ids),
        ),
        PageAction(
            "reschedule",
            gettext_lazy("Reschedule"),
            ngettext_lazy(
                "Reschedule %(number)s message of %(topic)s?",
                "Reschedule %(number)s messages of %(topic)s?",
                "count",
            ),
            ("store", "retry"),
            RescheduleForm,
            named=lambda operations, chosen: operations.reschedule(
                chosen.topic.name, chosen.ids, **chosen.new
            ),
            always_asks=True,
            for_priorities=False,
        ),
        PageAction(
            "cancel",
            gettext_lazy("Cancel"),
            ngettext_lazy(
                "Cancel %(number)s message of %(topic)s? If it runs, its listener is notified; otherwise it is deleted.",
                "Cancel %(number)s messages of %(topic)s? Listeners of running messages are notified; the others are deleted.",
                "count",
            ),
            ("store", "prepare", "retry"),
            named=lambda operations, chosen: operations.cancel(chosen.topic.name, chosen.ids),
            is_danger=True,
            always_asks=True,
        ),
        PageAction(
            "bury",
            gettext_lazy("Put into Dead"),
            ngettext_lazy(
                "Put %(number)s message of %(topic)s into Dead?",
                "Put %(number)s messages of %(topic)s into Dead?",
                "count",
            ),
            ("store", "prepare", "retry"),
            BuryForm,
            named=lambda operations, chosen: operations.bury(chosen.topic.name, chosen.ids, chosen.why),
            always_asks=True,
        ),
        PageAction(
            "delete",
            gettext_lazy("Delete"),
            ngettext_lazy(
                "Delete %(number)s message of %(topic)s?", "Delete %(number)s messages of %(topic)s?", "count"
            ),
            ("store", "prepare", "retry", "dead"),
            DeleteForm,
            named=lambda operations, chosen: operations.delete(
                chosen.topic.name, chosen.ids, "dead" if chosen.state == "dead" else "live", keep=chosen.keep
            ),
            is_danger=True,
            always_asks=True,
        ),
        PageAction(
            "replay_all",
            gettext_lazy("Replay all"),
            ngettext_lazy(
                "Replay %(number)s dead message of %(topic)s?",
                "Replay %(number)s dead messages of %(topic)s?",
                "count",
            ),
            ("dead",),
            RateForm,
            sweep=lambda operations, chosen, **bounds: operations.replay_all(
                chosen.topic.name, chosen.wanted, **bounds
            ),
            background="replay",
        ),
        PageAction(
            "reschedule_all",
            gettext_lazy("Reschedule all"),
            ngettext_lazy(
                "Reschedule %(number)s message of %(topic)s? (%(state)s)",
                "Reschedule %(number)s messages of %(topic)s? (%(state)s)",
                "count",
            ),
            ("store", "retry"),
            RescheduleForm,
            sweep=lambda operations, chosen, **bounds: operations.reschedule_all(
                chosen.topic.name, chosen.state, chosen.wanted, **chosen.new, **bounds
            ),
            for_priorities=False,
        ),
        PageAction(
            "bury_all",
            gettext_lazy("Put all into Dead"),
            ngettext_lazy(
                "Put %(number)s message of %(topic)s into Dead? (%(state)s)",
                "Put %(number)s messages of %(topic)s into Dead? (%(state)s)",
                "count",
            ),
            ("store", "retry"),
            BuryForm,
            sweep=lambda operations, chosen, **bounds: operations.bury_all(
                chosen.topic.name, chosen.state, chosen.wanted, why=chosen.why, **bounds
            ),
            for_filtered=True,
        ),
        PageAction(
            "delete_all",
            gettext_lazy("Delete all matches"),
            ngettext_lazy(
                "Delete %(number)s matching message of %(topic)s? (%(state)s)",
                "Delete %(number)s matching messages of %(topic)s? (%(state)s)",
                "count",
            ),
            ("store", "retry", "dead"),
            DeleteForm,
            sweep=lambda operations, chosen, **bounds: operations.delete_all(
                chosen.topic.name, chosen.state, chosen.wanted, keep=chosen.keep, **bounds
            ),
            is_danger=True,
            for_filtered=True,
            background="delete",
        ),
        PageAction(
            "purge",
            gettext_lazy("Purge"),
            ngettext_lazy(
                "Purge %(number)s message of %(topic)s? (%(state)s)",
                "Purge %(number)s messages of %(topic)s? (%(state)s)",
                "count",
            ),
            ("store", "retry", "dead"),
            PurgeForm,
            sweep=lambda operations, chosen, **bounds: operations.purge(
                chosen.topic.name,
                chosen.state,
                older_than=chosen.wanted.older_than,
                slot=chosen.wanted.slot,
                keep=chosen.keep,
                **bounds,
            ),
            is_danger=True,
            for_filtered=False,
            background="purge",
        ),
    )
}


def named_acts(operations: Operations, topic: Topic, state: str) -> list[PageAction]:
    """Return the actor's actions on chosen messages of a state."""
    return [
        act
        for act in ACTS.values()
        if act.named and act.fits(topic, state) and operations.may(topic, act.permission)
    ]


def sweeping_acts(operations: Operations, topic: Topic, state: str, wanted: Filter) -> list[PageAction]:
    """Return the actor's actions on all messages of a state that ``wanted`` selects."""
    return [
        act
        for act in ACTS.values()
        if act.sweep
        and act.fits(topic, state)
        and act.fits_filter(wanted)
        and operations.may(topic, act.permission)
    ]
