"""A list of messages as a file, in CSV or JSON lines, whose messages are read while the browser loads it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain

from django.http import Http404, HttpRequest, HttpResponseBase, StreamingHttpResponse

from django_rmq.admin.labels import STATES
from django_rmq.admin.message_views import filter_form
from django_rmq.admin.page import Pages, topic_page
from django_rmq.core.model.body_codec import dumps
from django_rmq.core.model.status import STATE_OF
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest
from django_rmq.operations import Filter, MessageCopy, Operations, Permission
from django_rmq.operations.message_view import body_columns, copy_as_json
from django_rmq.operations.messages import pages as pages_of

MOST_EXPORTED = 10_000
"""The number of messages in a file at most."""

MOST_BYTES = 67_108_864
"""Bytes of bodies after which a file ends."""

MOST_EXAMINED = 200_000
"""The number of entries that the search for the messages of a file examines at most."""

PAGE_EXPORTED = 500

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""Beginnings of texts that spreadsheets take for formulas, or skip before one."""

_COLUMNS = (
    "id",
    "state",
    "slot",
    "at",
    "priority",
    "failures",
    "failed",
    "error_class",
    "error",
    "key",
    "headers",
    "body",
    "encoding",
    "size",
)


@topic_page(Permission.VIEW)
def export_view(pages: Pages, request: HttpRequest, operations: Operations, topic: Topic) -> HttpResponseBase:
    """Return the messages of a list as a file, page by page while the browser reads it."""
    state, kind = request.GET.get("tab", "store"), request.GET.get("as", "jsonl")
    if state not in STATES or kind not in _FORMATS:
        raise Http404("no such list or format")
    form = filter_form(operations, topic, state, request.GET)
    if form.problems:
        raise InvalidRequest(" ".join(form.problems))
    copies = _exported(operations, topic, state, form.wanted)
    # An error of the first message is a page; a later one ends the download as one that failed.
    first = next(copies, None)
    write, content_type, ending = _FORMATS[kind]
    columns = operations.config.admin.columns_of(topic.name)
    response = StreamingHttpResponse(
        write(copies if first is None else chain([first], copies), columns), content_type=content_type
    )
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{topic.name}-{STATE_OF[state]}.{ending}")
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    response["X-Content-Type-Options"] = "nosniff"
    return response


def _exported(operations: Operations, topic: Topic, state: str, wanted: Filter) -> Iterator[MessageCopy]:
    """Yield the messages of a list, and record how many were read."""
    size = count = 0
    bounds = {"limit": MOST_EXPORTED, "most_examined": MOST_EXAMINED, "page_size": PAGE_EXPORTED}
    try:
        for page in pages_of(operations, topic.name, state, wanted, **bounds):
            for copy in page.copies:
                yield copy
                count, size = count + 1, size + copy.size
                if size >= MOST_BYTES:
                    return
    finally:
        if count:
            what = ", ".join(part for part in (state, wanted.description) if part)
            operations.record("export", topic.name, {"exported": count}, what)


def _json_lines(copies: Iterator[MessageCopy], columns: Sequence[str]) -> Iterator[str]:
    for copy in copies:
        chosen = {"columns": body_columns(copy, columns)} if columns else {}
        yield dumps(copy_as_json(copy) | chosen) + "\n"


def _csv(copies: Iterator[MessageCopy], columns: Sequence[str]) -> Iterator[str]:
    yield _csv_line([*_COLUMNS, *(_cell(f"body.{path}") for path in columns)])
    for copy in copies:
        row = copy_as_json(copy)
        row["at"] = (
            ""
            if copy.at_ms is None
            else datetime.fromtimestamp(copy.at_ms / 1000, UTC).isoformat(timespec="milliseconds")
        )
        chosen = body_columns(copy, columns).values()
        yield _csv_line([*(_cell(row[name]) for name in _COLUMNS), *map(_cell, chosen)])


def _csv_line(cells: list[object]) -> str:
    line = io.StringIO()
    csv.writer(line, quoting=csv.QUOTE_MINIMAL).writerow(cells)
    return line.getvalue()


def _cell(value: object) -> str:
    """Return a value as a spreadsheet takes it for text or for a number, and for no formula."""
    if value is None or value == {}:
        return ""
    text = value if isinstance(value, str) else dumps(value, ensure_ascii=False)
    text = text.encode("utf-8", "replace").decode()
    # A negative number is one, and no formula.
    return f"'{text}" if isinstance(value, str) and text.startswith(FORMULA_STARTS) else text


_FORMATS: dict[str, tuple[Callable[[Iterator[MessageCopy], Sequence[str]], Iterator[str]], str, str]] = {
    "jsonl": (_json_lines, "application/x-ndjson; charset=utf-8", "jsonl"),
    "csv": (_csv, "text/csv; charset=utf-8", "csv"),
}
"""Name → writer, content type, and ending of the file."""
