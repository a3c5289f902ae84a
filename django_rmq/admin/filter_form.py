"""The filter above a list of messages, as a form; the same parameters travel through actions and back."""

from __future__ import annotations

from django import forms
from django.http import QueryDict
from django.utils.translation import gettext_lazy as _

from django_rmq.admin.body_display import visible
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import OperationRefused
from django_rmq.operations.filters import Filter, check_age

LONGEST_TEXT = 200
"""Maximum size of a search text in bytes. A link to a message contains it, with up to five characters per byte."""

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
    if size > LONGEST_TEXT:
        raise forms.ValidationError(
            _("At most %(limit)d bytes, got %(size)d."), params={"limit": LONGEST_TEXT, "size": size}
        )


class FilterForm(forms.Form):
    """The fields by which a list of this topic and state can be filtered; others are left out."""

    text = forms.CharField(
        label=_("Text"),
        required=False,
        strip=False,
        max_length=LONGEST_TEXT,
        validators=[check_length],
        widget=forms.TextInput(attrs={"type": "search", "placeholder": _("in body, key or error")}),
    )
    error = forms.CharField(
        label=_("Error class"),
        required=False,
        max_length=LONGEST_TEXT,
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
    def described(self) -> list[tuple[str, str]]:
        """The conditions in words: the label of each field that is not empty, and its value."""
        found = []
        for name, value in self.values:
            field = self.fields[name]
            chosen = visible(value)
            if name == "age":
                for group, ages in AGES[1:]:
                    chosen = next((f"{group} {label}" for age, label in ages if age == value), chosen)
            found.append((str(field.label), chosen))
        return found

    @property
    def values(self) -> list[tuple[str, str]]:
        """The parameters that are not empty, for hidden fields."""
        return [(name, str(self.data.get(name))) for name in self.fields if self.data.get(name)]
