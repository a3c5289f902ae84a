"""The answers on the page of REST routes have the fields that the API answers with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from django_rmq.testing import memory_broker
from tests.integration.test_api import ALL, Program, user_with

pytestmark = pytest.mark.django_db
PAGE = (Path(__file__).parents[2] / "docs/reference/rest.md").read_text()
EXAMPLES = re.findall(
    r"^### .*\n\n```text\n(GET|POST) (\S+)\n(.*\n)?```\n\n```json\n((?:.|\n)*?)```", PAGE, re.MULTILINE
)
ROUTE = "topics/image-renders"


def shape(value: Any) -> Any:
    """Return the names in an answer, and what is below each."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else None


@pytest.fixture
def program() -> Iterator[Program]:
    """A program, and a message that is dead: as the page shows them."""
    topics = {"image-renders": {"TYPE": "priority", "SLOTS": 16}}
    with override_settings(RMQ={"BROKER": "memory", "TOPICS": topics}), memory_broker():
        found = Program(user_with(*ALL))
        found.ok("POST", f"{ROUTE}/messages/", {"body": {"sku": 1, "shop": 7}, "priority": 500}, 202)
        consumer = {"consumer": "6f9619ff-8b86-4d01-b42d-00cf4fc964ff"}
        (taken,) = found.ok("POST", f"{ROUTE}/prepare/", consumer)["messages"]
        failed = {
            "id": taken["id"],
            "receipt": taken["receipt"],
            "error": "Timeout: no answer",
            "reject": True,
        }
        found.ok("POST", f"{ROUTE}/rollback/", {"deliveries": [failed]})
        yield found


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == PAGE.count("```json") == 8


@pytest.mark.parametrize(("method", "path", "body", "answer"), EXAMPLES, ids=[each[1] for each in EXAMPLES])
def test_an_answer_has_the_fields_that_the_page_shows(
    program: Program, method: str, path: str, body: str, answer: str
) -> None:
    if "purge" in path:
        program.ok("POST", f"{ROUTE}/messages/", {"body": 1, "priority": 500}, 202)
    response = program(method, path, json.loads(body) if body else None)
    assert shape(response.json()) == shape(json.loads(answer))
