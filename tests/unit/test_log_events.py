"""Every event that is logged is in the docs with its fields, and nothing else is."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_FAILURES = {"failed", "undecodable", "overran", "rejected"}


def logged() -> dict[str, set[str]]:
    """Return event → fields, as the code says."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "django_rmq").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                not isinstance(node, ast.keyword)
                or node.arg != "extra"
                or not isinstance(node.value, ast.Dict)
            ):
                continue
            fields = {
                str(key.value): value
                for key, value in zip(node.value.keys, node.value.values, strict=True)
                if isinstance(key, ast.Constant)
            }
            event = fields.pop("rmq_event")
            for name in {str(event.value)} if isinstance(event, ast.Constant) else OF_FAILURES:
                found[name] |= fields.keys()
    return dict(found)


def documented() -> dict[str, set[str]]:
    """Return event → fields, as the docs say."""
    found: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "reference" / "logging.md").read_text().splitlines():
        cells = line.split("|")
        if len(cells) == 6 and (events := re.findall(r"`([a-z_]+)`", cells[1])) != ["rmq_event"]:
            found |= {event: set(re.findall(r"`(\w+)`", cells[3])) for event in events}
    return found


def test_the_docs_name_every_event_with_its_fields() -> None:
    events, shown = logged(), documented()
    assert len(events) > 20
    # Two events share a line where the second has a field more.
    shown["process_started"] -= {"rmq_exit_code"}
    assert shown == events
