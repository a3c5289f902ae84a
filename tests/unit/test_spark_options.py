"""Options of format("rmq") that are times are written as in Spark's own sources."""

from __future__ import annotations

import pytest

from django_rmq.exceptions import ConfigurationError
from django_rmq.spark.source_options import STREAM, SourceOptions, gathering


def given(**options: str) -> SourceOptions:
    return SourceOptions({"url": "redis://rmq/0", "topic": "any", **options}, STREAM, "a test")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90", 90), ("90s", 90), ("1.5", 1.5), (".5", 0.5), ("250ms", 0.25), ("15m", 900), ("15 min", 900)),
        *(("2H", 7_200), ("1d", 86_400), ("0", 0), ("1h30m", 5_400)),
    ],
)
def test_a_time_has_a_unit_or_is_in_seconds(text: str, seconds: float) -> None:
    assert gathering(given(maxTriggerDelay=text)) == (0, seconds)
    assert given(patience=text).patience == seconds


@pytest.mark.parametrize("text", ["", "soon", "15 weeks", "-1", "2d", "nan", "inf", "30m1h", "m"])
def test_what_is_no_time_names_its_option(text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        gathering(given(maxTriggerDelay=text))
    assert str(refused.value) == (
        f"option maxTriggerDelay must be a duration such as 90, 250ms, 15m or 7d, from 0s to 1d, got {text!r}"
    )


def test_bounds_are_those_of_the_option() -> None:
    assert given(claimTimeout="5m").lease_ms == 300_000
    assert given(pollInterval="100ms").poll_seconds == 0.1
    with pytest.raises(ConfigurationError, match=r"claimTimeout must be a duration .*from 1s to 1d"):
        _ = given(claimTimeout="500ms").lease_ms
