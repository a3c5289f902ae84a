"""The forms of pages: the limits of a topic, a body, a message to send, and the filter of messages.

The forms of the questions before an action are in ``page_actions``, and that of a schedule is in ``schedule_views``.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from django import forms
from django.http import QueryDict
from django.utils import timezone
from django.utils.functional import lazy
from django.utils.translation import gettext_lazy as _

from django_rmq.admin.body_display import visible
from django_rmq.admin.labels import Text
from django_rmq.core.model.body_codec import encode_body, exact_json
from django_rmq.core.model.bounds import FASTEST, LARGEST, LONGEST_WAIT, MAX_TIMEOUT, SHORTEST_WAIT, SLOWEST
from django_rmq.core.model.topic import SCORE_OPTIONS, Topic, TopicType
from django_rmq.durations import InvalidDuration, duration_text, parse_duration
from django_rmq.exceptions import InvalidBody, InvalidMessage, OperationRefused
from django_rmq.operations import TopicLimits
from django_rmq.operations.filters import Filter, check_age
from django_rmq.operations.sends import body_schema


class LimitsForm(forms.Form):
    """The limits of a topic at run time."""

    max_rate = forms.FloatField(
        label=_("Messages per second"),
        required=False,
        min_value=0,
        max_value=FASTEST,
        widget=forms.NumberInput(attrs={"step": "any"}),
    )
    max_in_flight = forms.IntegerField(
        label=_("Messages in flight at most"), required=False, min_value=0, max_value=LARGEST - 1
    )

    def __init__(self, limits: TopicLimits, data: QueryDict | None = None) -> None:
        changed = limits.changed.values if limits.changed is not None else {}
        super().__init__(
            data,
            initial={name: value or 0 for name, value in changed.items()},
            auto_id="rmq-%s",
            label_suffix="",
        )
        for name, field in self.fields.items():
            field.help_text = _("Leave empty for the settings (%(value)s). 0: no limit.") % {
                "value": limit_text(getattr(limits.declared, name))
            }

    def clean_max_rate(self) -> float | None:
        value: float | None = self.cleaned_data["max_rate"]
        if value and value < SLOWEST:
            raise forms.ValidationError(_("This is slower than the slowest rate, 0.000001."))
        return value

    @property
    def values(self) -> dict[str, float | None]:
        """The limits that were given."""
        return {name: value or None for name, value in self.cleaned_data.items() if value is not None}


def limit_text(value: float | None) -> str:
    return str(_("no limit")) if value is None else f"{value:.9g}"


class BodyForm(forms.Form):
    """A body as text; an invalid body is an error of its field."""

    body = forms.CharField(
        label=_("Body"),
        strip=False,
        required=False,
        widget=forms.Textarea(attrs={"rows": 14, "spellcheck": "false"}),
    )

    def __init__(
        self, topic: Topic, data: QueryDict | None = None, initial: dict[str, object] | None = None
    ) -> None:
        super().__init__(data, initial=initial, auto_id="rmq-%s", label_suffix="")
        self.topic = topic
        kinds = {"json": _("JSON."), "text": _("Text."), "bytes": _("Text, sent as UTF-8.")}
        self.fields["body"].help_text = kinds[topic.body]
        schema = body_schema(topic)
        if topic.typed is not None:
            self.fields["body"].help_text = _("JSON of the type %(path)s.") % {"path": topic.typed.path}
        self.schema = "" if schema is None else json.dumps(schema, ensure_ascii=False, indent=2)

    def clean_body(self) -> object:
        # Browsers send line ends as CR LF, whatever the original text had.
        text = str(self.cleaned_data["body"]).replace("\r\n", "\n")
        body: object = text
        if self.topic.body == "json":
            try:
                body = exact_json(text)
            except (ValueError, RecursionError) as error:
                raise forms.ValidationError(_("This is not JSON: %(error)s") % {"error": error}) from None
        elif self.topic.body == "bytes":
            body = text.encode()
        try:
            encode_body(self.topic, body)
        except InvalidBody as error:
            wrong = [f"{at}: {text}" if at else text for at, texts in error.fields.items() for text in texts]
            raise forms.ValidationError(wrong) from None
        except InvalidMessage as error:
            raise forms.ValidationError(str(error)) from None
        return body


TYPED_TIME = "%Y-%m-%dT%H:%M:%S"
"""A date and time as a browser sends it."""


def _with_time_zone(text: Text) -> str:
    zone = _("Time zone: %(zone)s.") % {"zone": timezone.get_current_timezone_name()}
    return f"{text} {zone}" if text else zone


class TypedTimeField(forms.DateTimeField):
    """A date and time, for which a browser has a calendar. Its help text names the time zone."""

    def __init__(self, *, help_text: Text = "", **options: Any) -> None:
        super().__init__(
            # The time zone may be another one with each request.
            help_text=lazy(_with_time_zone, str)(help_text),
            widget=forms.DateTimeInput(attrs={"type": "datetime-local", "step": "1"}, format=TYPED_TIME),
            input_formats=[TYPED_TIME, "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M"],
            **options,
        )

    def to_python(self, value: Any) -> datetime | None:
        """Return the instant, which is aware also where USE_TZ is false. None: the field is empty."""
        instant = super().to_python(value)
        return timezone.make_aware(instant) if instant and timezone.is_naive(instant) else instant


class DurationField(forms.Field):
    """A duration as text, such as ``90``, ``250ms`` or ``15m``."""

    def __init__(self, least: timedelta, most: timedelta = LONGEST_WAIT, **options: Any) -> None:
        super().__init__(**options)
        self._least = least
        self._most = most

    def to_python(self, value: object) -> timedelta | None:
        """Return the duration. None: the field is empty."""
        if value in self.empty_values:
            return None
        try:
            return parse_duration(value, self._least, self._most, is_short=self._most == LONGEST_WAIT)
        except InvalidDuration as error:
            raise forms.ValidationError(
                _("This is not a time from %(least)s to %(most)s with a unit, such as 250ms, 5s, 15m or 2h.")
                % {"least": duration_text(self._least), "most": duration_text(self._most)}
            ) from error


class SendForm(BodyForm):
    """A message to send, with the options of its topic's type."""

    key = forms.CharField(
        label=_("Key"),
        required=False,
        help_text=_("Messages with equal keys are the same message. Leave empty for a new key."),
    )
    fresh_key = forms.UUIDField(required=False, widget=forms.HiddenInput, initial=uuid4)
    priority = forms.IntegerField(
        label=_("Priority"),
        help_text=_("The highest number is delivered first. Leave empty for the topic's DEFAULT_PRIORITY."),
    )
    time_range = DurationField(
        SHORTEST_WAIT,
        label=_("Time range"),
        required=False,
        help_text=_(
            "Sends within this time, such as 5s or 15m, are merged. Leave empty for the topic's TIME_RANGE."
        ),
    )
    delay = DurationField(
        timedelta(),
        label=_("Delay"),
        required=False,
        help_text=_("A time such as 5s or 15m. Leave empty to deliver it as soon as its turn comes."),
    )
    max_retries = forms.IntegerField(
        label=_("Retries at most"),
        required=False,
        min_value=0,
        help_text=_("Leave empty for the topic's MAX_RETRIES."),
    )
    timeout = DurationField(
        timedelta(seconds=1),
        timedelta(seconds=MAX_TIMEOUT),
        label=_("Time-out"),
        required=False,
        help_text=_("Whole seconds, or a time such as 30s or 5m. Leave empty for the topic's TIMEOUT."),
    )
    fixed_time = TypedTimeField(label=_("Due"))

    def __init__(
        self, topic: Topic, data: QueryDict | None = None, initial: dict[str, object] | None = None
    ) -> None:
        super().__init__(topic, data, initial)
        if not topic.keyed:
            for name in ("key", "fresh_key", "max_retries", "timeout"):
                del self.fields[name]
        for topic_type, name in SCORE_OPTIONS.items():
            if topic_type is not topic.type:
                del self.fields[name]
        if topic.type is TopicType.RANGE_MERGE:
            self.fields["time_range"].required = topic.time_range_ms is None
        if topic.is_priority:
            self.fields["priority"].required = topic.default_priority is None

    @property
    def options(self) -> dict[str, object]:
        """The options of ``send_message``."""
        given: dict[str, object] = {
            name: value for name, value in self.cleaned_data.items() if name != "body"
        }
        # Generated with the form, so that a message sent twice is still one message.
        fresh = given.pop("fresh_key", None)
        if fresh and not given["key"]:
            given["key"] = str(fresh)
        return {name: value for name, value in given.items() if value not in (None, "")}


LONGEST_FILTER_TEXT = 200
"""Maximum size of a search text in bytes. A link to a message contains it, with up to five characters per byte.
REST takes longer texts (``api.requests.LONGEST_TEXT``)."""

PARAMETERS = ("text", "error", "cause", "age", "slot")

AGES = (
    ("", _("any age")),
    (
        _("Older than"),
        (
            ("older:60", _("1 minute")),
            ("older:600", _("10 minutes")),
            ("older:3600", _("1 hour")),
            ("older:86400", _("1 day")),
            ("older:604800", _("1 week")),
        ),
    ),
    (
        _("Younger than"),
        (
            ("newer:60", _("1 minute")),
            ("newer:600", _("10 minutes")),
            ("newer:3600", _("1 hour")),
            ("newer:86400", _("1 day")),
        ),
    ),
)


def check_length(text: str) -> None:
    """Raise ``ValidationError`` for a text with too many bytes."""
    size = len(text.encode("utf-8", "replace"))
    if size > LONGEST_FILTER_TEXT:
        raise forms.ValidationError(
            _("At most %(limit)d bytes, got %(size)d."), params={"limit": LONGEST_FILTER_TEXT, "size": size}
        )


class FilterForm(forms.Form):
    """The fields by which a list of this topic and state can be filtered; others are left out."""

    text = forms.CharField(
        label=_("Text"),
        required=False,
        strip=False,
        max_length=LONGEST_FILTER_TEXT,
        validators=[check_length],
        widget=forms.TextInput(attrs={"type": "search", "placeholder": _("in body, key or error")}),
    )
    error = forms.CharField(
        label=_("Error class"),
        required=False,
        max_length=LONGEST_FILTER_TEXT,
        validators=[check_length],
        widget=forms.TextInput(attrs={"placeholder": "ValueError"}),
    )
    cause = forms.RegexField(r"^[0-9a-f]{12}$", label=_("Cause"), required=False)
    age = forms.ChoiceField(label=_("Age"), required=False, choices=AGES)
    slot = forms.IntegerField(label=_("Slot"), required=False, min_value=0)

    def __init__(self, topic: Topic, state: str, *, may_search: bool, data: QueryDict) -> None:
        super().__init__(data, auto_id="rmq-filter-%s", use_required_attribute=False)
        self.topic = topic
        self.fields["slot"].widget.attrs["max"] = topic.slots - 1
        self.fields["slot"].max_value = topic.slots - 1  # type: ignore[attr-defined]
        if not may_search:
            del self.fields["text"]
        # The page of the causes gives it; nobody types it.
        if state == "prepare" or not self.data.get("cause"):
            del self.fields["cause"]
        if state == "prepare":
            del self.fields["error"]
        try:
            check_age(topic, state)
        except OperationRefused:
            del self.fields["age"]
        if topic.slots == 1:
            del self.fields["slot"]

    def clean_slot(self) -> int | None:
        slot: int | None = self.cleaned_data["slot"]
        if slot is not None and slot >= self.topic.slots:
            raise forms.ValidationError(
                _("Topic %(topic)s has the slots 0 to %(last)d.")
                % {"topic": self.topic.name, "last": self.topic.slots - 1}
            )
        return slot

    @property
    def wanted(self) -> Filter:
        """The resulting filter; a field with an error counts as empty."""
        self.is_valid()
        given = self.cleaned_data
        kind, _colon, seconds = given.get("age", "").partition(":")
        return Filter(
            text=given.get("text", ""),
            error=given.get("error", ""),
            cause=given.get("cause", ""),
            older_than=float(seconds) if kind == "older" else None,
            newer_than=float(seconds) if kind == "newer" else None,
            slot=given.get("slot"),
        )

    @property
    def problems(self) -> list[str]:
        """The errors of all fields."""
        return [str(error) for errors in self.errors.values() for error in errors]

    def described(self, cause: str) -> list[tuple[str, str]]:
        """Return the conditions in words: the label of each field that is not empty, and its value.

        ``cause``: the text of the chosen cause, whose id says nothing to people; empty if it is unknown.
        """
        parts = []
        for name, value in self.values:
            field = self.fields[name]
            chosen = (cause if name == "cause" else "") or visible(value)
            if name == "age":
                for group, ages in AGES[1:]:
                    chosen = next((f"{group} {label}" for age, label in ages if age == value), chosen)
            parts.append((str(field.label), chosen))
        return parts

    @property
    def values(self) -> list[tuple[str, str]]:
        """The parameters that are not empty, for hidden fields."""
        return [(name, str(self.data.get(name))) for name in self.fields if self.data.get(name)]
