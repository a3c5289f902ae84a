"""The forms of pages: the limits of a topic, a body, and a message to send."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any
from uuid import uuid4

from django import forms
from django.http import QueryDict
from django.utils.translation import gettext_lazy as _

from django_rmq.core.model.body_codec import encode_body, exact_json
from django_rmq.core.model.limits import FASTEST, LARGEST, LONGEST_WAIT, MAX_TIMEOUT, SHORTEST_WAIT, SLOWEST
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.durations import InvalidDuration, duration_text, parse_duration
from django_rmq.exceptions import InvalidBody, InvalidMessage
from django_rmq.operations import TopicLimits
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

    def __init__(self, found: TopicLimits, data: QueryDict | None = None) -> None:
        changed = found.changed.values if found.changed is not None else {}
        super().__init__(
            data,
            initial={name: value or 0 for name, value in changed.items()},
            auto_id="rmq-%s",
            label_suffix="",
        )
        for name, field in self.fields.items():
            field.help_text = _("Leave empty for the settings (%(value)s). 0: no limit.") % {
                "value": limit_text(getattr(found.declared, name))
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
    """Return a limit as text."""
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


class TypedTimeField(forms.DateTimeField):
    """A date and time, for which a browser has a calendar."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            widget=forms.DateTimeInput(attrs={"type": "datetime-local", "step": "1"}, format=TYPED_TIME),
            input_formats=[TYPED_TIME, "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M"],
            **options,
        )


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
    priority = forms.IntegerField(label=_("Priority"), help_text=_("The highest number is delivered first."))
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
        wanted = {
            TopicType.RANGE_MERGE: "time_range",
            TopicType.PRIORITY: "priority",
            TopicType.FIXED_TIME: "fixed_time",
            TopicType.FIFO: "delay",
        }[topic.type]
        for name in ("priority", "time_range", "fixed_time", "delay"):
            if name != wanted:
                del self.fields[name]
        if topic.type is TopicType.RANGE_MERGE:
            self.fields["time_range"].required = topic.time_range_ms is None

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
