"""Spark without Spark: the command that runs pipelines, and options that are times."""

from __future__ import annotations

import io
from argparse import ArgumentParser
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from django_rmq.exceptions import ConfigurationError
from django_rmq.spark.pipelines import Context, Pipeline, pipelines, register
from django_rmq.spark.pipelines.pipeline import connection_options
from django_rmq.spark.source_options import STREAM, SourceOptions, gathering

TOPICS = {"events": {"TYPE": "priority", "SLOTS": 4}}


def settings(**redis: Any) -> Any:
    return override_settings(RMQ={"REDIS": "redis://127.0.0.1:1/0", "TOPICS": TOPICS, **redis})


def test_without_a_name_the_pipelines_are_listed() -> None:
    output = io.StringIO()
    call_command("runrmqpipeline", stdout=output)
    assert {"archive", "consume", "ingest", "replay", "report"} <= {
        line.split()[0] for line in output.getvalue().splitlines()
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "invalid choice: 'nothing'"),
        (
            ["report", "--interval", "soon"],
            "must be a duration such as 90, 250ms, 15m or 7d, from 0s to 36525d, got 'soon'",
        ),
        (["report", "--interval", "5s", "--available-now"], "not allowed with argument"),
        (["report", "--conf", "x"], "'x' is not a setting"),
        (["ingest", "events", "rows.csv", "--checkpoint", ""], "'' is not the path of a folder"),
        (["ingest", "events", "rows.csv", "--checkpoint", "/"], "'/' is not the path of a folder"),
        (["ingest", "events"], "required: source"),
    ],
)
def test_what_is_typed_wrongly_is_told(arguments: list[str], said: str) -> None:
    with pytest.raises(CommandError, match=said):
        call_command("runrmqpipeline", *arguments)


@pytest.mark.parametrize(
    ("missing", "options", "said"),
    [
        ("pyspark", (), "Spark needs pyspark.*pip install"),
        ("pyarrow", (), "Spark needs pyarrow.*pip install"),
        ("grpc", ("--remote", "sc://127.0.0.1:1"), r"needs grpc.*django-redis-rmq\[connect\]"),
        ("java", (), "Spark needs Java 17"),
    ],
)
def test_what_is_missing_is_said_with_what_to_do(
    missing: str, options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_rmq.spark.java.find_spec", lambda name: None if name == missing else object())
    if missing == "java":
        monkeypatch.setattr("django_rmq.spark.java.find_java", lambda: None)
    with pytest.raises(CommandError, match=said) as caught:
        call_command("runrmqpipeline", "report", *options)
    assert caught.value.returncode == 2


def test_where_redis_does_not_answer_the_code_is_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_rmq.management.commands.runrmqpipeline.check_installed", lambda remote: None)
    with settings(), pytest.raises(CommandError) as caught:
        call_command("runrmqpipeline", "report")
    assert caught.value.returncode == 3


def test_a_name_is_taken_once() -> None:
    class Mine(Pipeline):
        name = "report"

        def add_arguments(self, parser: ArgumentParser) -> None: ...
        def run(self, context: Context, **options: Any) -> None: ...

    pipelines()
    with pytest.raises(ConfigurationError, match='two pipelines have the name "report"'):
        register(Mine)


def test_the_login_is_told_apart_from_the_address() -> None:
    with settings(REDIS="redis://me:p%40ss@127.0.0.1:6379/3", KEY_PREFIX="x:"):
        assert connection_options() == {
            "url": "redis://127.0.0.1:6379/3",
            "username": "me",
            "password": "p@ss",
            "prefix": "x:",
        }
    with settings(REDIS={"CLUSTER": ["redis://:s@127.0.0.1:7000", "redis://:s@127.0.0.1:7001"]}):
        found = connection_options()
    assert found["url"] == "redis://127.0.0.1:7000,redis://127.0.0.1:7001"
    assert (found["cluster"], found["password"]) == ("true", "s")
    with settings(BROKER="memory"), pytest.raises(ConfigurationError, match="Spark needs Redis"):
        connection_options()


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
