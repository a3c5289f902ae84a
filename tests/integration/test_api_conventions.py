"""REST: the conventions of Django's REST framework that the API follows (docs/decisions/0016)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.apps import apps
from django.test import override_settings
from django.urls import reverse
from rest_framework.renderers import BrowsableAPIRenderer

from django_rmq.api import urls
from django_rmq.api.probes import PublicView
from django_rmq.operations import Permission
from django_rmq.testing import memory_broker
from tests.support.programs import ALL, Program, user_with

pytestmark = pytest.mark.django_db

TOPICS = {"ranked": {"TYPE": "priority", "SLOTS": 1}}
BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
ROUTES = [
    (re.sub(r"<str:id>", "0.MQ", route.replace("<str:topic>", "ranked")), view)
    for route, view in urls.ROUTES.values()
]


class Branded(BrowsableAPIRenderer):
    """A browsable API as a project may have it."""

    def get_context(self, *args: Any, **options: Any) -> Any:
        return {**super().get_context(*args, **options), "name": "The shop's API"}


@pytest.fixture(autouse=True)
def broker() -> Iterator[None]:
    with override_settings(RMQ={"BROKER": "memory", "TOPICS": TOPICS}), memory_broker():
        yield


@pytest.fixture
def program() -> Program:
    return Program(user_with(*ALL))


def rendering(*kinds: type[Any]) -> Any:
    """Let the project have renderers."""
    ours = {
        "DEFAULT_AUTHENTICATION_CLASSES": ["rest_framework.authentication.SessionAuthentication"],
        "DEFAULT_RENDERER_CLASSES": [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds],
    }
    return override_settings(REST_FRAMEWORK=ours)


def test_the_routes_of_version_1_answer_without_the_version_too(program: Program) -> None:
    for path in ("topics/", "topics/ranked/", "workers/", "slots/?topic=ranked"):
        answers = [program.ok("GET", f"{version}{path}") for version in ("v1/", "")]
        for answer in answers:
            for one in [answer, *answer.get("results", ())]:
                one.pop("now_ms", None)
        assert answers[0] == answers[1]
    program.refused(404, "topic_not_found", "GET", "v1/topics/nosuch/")
    assert program("GET", "v2/topics/").status_code == 404


def test_reverse_and_the_next_page_name_the_version(program: Program) -> None:
    assert reverse("rmq_api:prepare", args=["ranked"]) == "/api/rmq/v1/topics/ranked/prepare/"
    assert reverse("rmq_api:ready") == "/api/rmq/v1/health/ready/"
    many = {"messages": [{"body": n, "priority": 50} for n in range(3)]}
    program.ok("POST", "v1/topics/ranked/messages/", many, 202)
    page = program.ok("GET", "v1/topics/ranked/messages/?page_size=2")
    assert page["next"].startswith("http://testserver/api/rmq/v1/topics/ranked/messages/?page_size=2&cursor=")


def test_every_route_ends_with_a_slash(program: Program) -> None:
    assert all(route.endswith("/") for route, _ in urls.ROUTES.values())
    for version in ("", "v1/"):
        found = program("GET", f"{version}topics")
        assert (found.status_code, found["Location"]) == (301, f"/api/rmq/{version}topics/")


@pytest.mark.parametrize("path", ["health/live", "health/ready", "metrics"])
def test_a_probe_gets_no_redirect(program: Program, path: str) -> None:
    for version in ("", "v1/"):
        assert [program("GET", f"{version}{path}{end}").status_code for end in ("", "/")] == [200, 200]


@pytest.mark.parametrize(("path", "view"), ROUTES)
def test_options_says_what_a_route_does_and_requires(path: str, view: Any) -> None:
    public = issubclass(view, PublicView)
    if not public:
        Program().refused(401, "not_authenticated", "OPTIONS", f"v1/{path}")
    response = (Program() if public else Program(user_with()))("OPTIONS", f"v1/{path}")
    told = response.json()
    described = (response.status_code, told["renders"], told["parses"])
    assert described == (200, ["application/json"], ["application/json"])
    methods = {"GET"} if public else set(view.needs)
    assert set(response["Allow"].split(", ")) == methods | {"OPTIONS"} | (
        {"HEAD"} if "GET" in methods else set()
    )
    for method, needed in view.needs.items():
        (line,) = [line for line in told["description"].split("\n") if line.startswith(f"{method}: ")]
        assert len(line) > 20
        assert f"Requires the permission django_rmq.{needed.value}." in told["description"]


def test_options_tells_nothing_of_topics(program: Program) -> None:
    told = [program("OPTIONS", f"topics/{name}/prepare/").content for name in ("ranked", "nosuch")]
    assert told[0] == told[1]


def test_a_browser_gets_the_browsable_api_of_the_project(program: Program) -> None:
    program.ok("POST", "v1/topics/ranked/messages/", {"body": "<b>bold", "priority": 50}, 202)
    with rendering(Branded):
        page = program("GET", "v1/topics/ranked/messages/", **BROWSER)
        text = page.content.decode()
        assert (page.status_code, page["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert page["Cache-Control"] == "no-store"
        assert "The shop&#x27;s API" in text and "POST: Send one message or many." in text
        assert "&lt;b&gt;bold" in text and "<b>bold" not in text
        # A form for the JSON of a request.
        assert 'name="_content"' in text and 'value="application/json"' in text
        lost = program("GET", "v1/topics/nosuch/", **BROWSER)
        assert lost.status_code == 404 and "topic_not_found" in lost.content.decode()
        assert Program()("GET", "v1/topics/", **BROWSER).status_code == 401
        # Programs get what they got before.
        assert program("GET", "v1/topics/")["Content-Type"] == "application/json"
        assert program("GET", "v1/topics/", Accept="*/*")["Content-Type"] == "application/json"


@pytest.mark.parametrize(("path", "view"), ROUTES)
def test_every_route_can_be_looked_at_in_a_browser(program: Program, path: str, view: Any) -> None:
    with rendering(BrowsableAPIRenderer):
        page = program("GET", f"v1/{path}", **BROWSER)
    assert page["Content-Type"] == "text/html; charset=utf-8"
    assert page.status_code in (200, 400, 404, 405)


def test_a_project_without_a_browsable_renderer_has_none_here(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rendering():
        program.refused(406, "not_acceptable", "GET", "v1/topics/", Accept="text/html")
        assert program("GET", "v1/topics/", **BROWSER)["Content-Type"] == "application/json"
    real = apps.is_installed
    monkeypatch.setattr(apps, "is_installed", lambda name: name != "rest_framework" and real(name))
    with rendering(BrowsableAPIRenderer):
        program.refused(406, "not_acceptable", "GET", "v1/topics/", Accept="text/html")


def test_the_format_can_be_chosen_in_the_address(program: Program) -> None:
    with rendering(BrowsableAPIRenderer):
        for path in ("topics/", "topics/ranked/messages/?page_size=1&"):
            path = path if "?" in path else f"{path}?"
            assert program("GET", f"{path}format=json", **BROWSER)["Content-Type"] == "application/json"
            assert program("GET", f"{path}format=api")["Content-Type"].startswith("text/html")
            program.refused(404, "not_found", "GET", f"{path}format=evil")


def test_a_cursor_of_a_page_that_was_read_leads_back_to_it(program: Program) -> None:
    many = {"messages": [{"body": n, "priority": 50 + n} for n in range(6)]}
    program.ok("POST", "v1/topics/ranked/messages/", many, 202)
    first = program.ok("GET", "v1/topics/ranked/messages/?page_size=2")
    second = program.ok("GET", first["next"].partition("/api/rmq/")[2])
    third = program.ok("GET", second["next"].partition("/api/rmq/")[2])
    assert [one["body"] for one in third["results"]] == [1, 0]
    assert program.ok("GET", first["next"].partition("/api/rmq/")[2]) == second


def test_an_error_has_a_code_and_a_detail(program: Program) -> None:
    invalid = program.refused(400, "invalid", "GET", "v1/slots/").json()
    errors = {"topic": ["This field is required."]}
    assert invalid == {"code": "invalid", "detail": "The request is not valid.", "errors": errors}
    assert program("GET", "v1/topics/nosuch/").json().keys() == {"code", "detail"}
    viewer = Program(user_with(Permission.VIEW))
    assert viewer("POST", "v1/topics/ranked/pause/").json().keys() == {"code", "detail"}
