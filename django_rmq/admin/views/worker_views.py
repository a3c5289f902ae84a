"""The pages of worker processes: all of them, what they run over all topics, and the stack of a listener that runs.

Those that live can be asked to be quiet or to stop. Those that vanished and topics without a worker are listed, too.
"""

from __future__ import annotations

import math
from typing import get_args

from django.contrib import messages
from django.contrib.admin.utils import quote
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _

from django_rmq.admin.body_display import visible
from django_rmq.admin.views.page import PageAddresses, Pages, page, short_id, topic_page
from django_rmq.core.model.topic import Topic
from django_rmq.core.model.worker_report import WorkerReport, WorkerRequest
from django_rmq.exceptions import InvalidRequest, OperationRefused
from django_rmq.operations import Operations, Permission, RunningMessages, WorkerOverview, WorkerStack
from django_rmq.operations.authorization import PERMISSION_OF
from django_rmq.operations.worker_overview import ReportedWorker, processes_of
from django_rmq.templatetags.rmq_format import number

WORKERS_SHOWN = 500
"""The number of workers on the page."""

SILENT_MS = 15_000
"""Milliseconds after a request for a stack from which the page says why there may be no answer."""

TOPICS_NAMED = 50
"""The number of topics named in a cell or a list."""


@page(Permission.VIEW)
def workers_view(pages: Pages, request: HttpRequest, operations: Operations) -> HttpResponse:
    """Show all workers, and ask one of them for something."""
    if request.method == "POST":
        return _ask(pages, request, operations)
    return pages.render(request, "topic/workers.html", _context(pages, operations))


@page(Permission.VIEW)
def workers_live_view(pages: Pages, request: HttpRequest, operations: Operations) -> HttpResponse:
    """Return the current figures of the page of workers."""
    return pages.fragment(request, "topic/_workers.html", _context(pages, operations))


@page(Permission.VIEW)
def running_view(pages: Pages, request: HttpRequest, operations: Operations) -> HttpResponse:
    """Show the messages that run."""
    return pages.render(request, "topic/running.html", _running(pages, operations))


@page(Permission.VIEW)
def running_live_view(pages: Pages, request: HttpRequest, operations: Operations) -> HttpResponse:
    """Return the current content of the page of running messages."""
    return pages.fragment(request, "topic/_running.html", _running(pages, operations))


@topic_page(Permission.VIEW, Permission.VIEW_STACK)
def stack_view(
    pages: Pages, request: HttpRequest, operations: Operations, topic: Topic, message_id: str
) -> HttpResponse:
    """Show where the listener of a message is, or ask its worker for it."""
    try:
        if request.method == "POST":
            operations.ask_for_stacks(topic.name, short_id(message_id))
            return HttpResponseRedirect(request.path)
        context = _stack(pages, operations, topic, message_id)
    except InvalidRequest as error:
        raise Http404(str(error)) from error
    except OperationRefused as error:
        messages.error(request, str(error))
        return HttpResponseRedirect(request.path)
    return pages.render(request, "topic/stack.html", context, topic)


@topic_page(Permission.VIEW, Permission.VIEW_STACK)
def stack_live_view(
    pages: Pages, request: HttpRequest, operations: Operations, topic: Topic, message_id: str
) -> HttpResponse:
    """Return the current content of the page of a stack."""
    try:
        context = _stack(pages, operations, topic, message_id)
    except InvalidRequest as error:
        raise Http404(str(error)) from error
    return pages.fragment(request, "topic/_stack.html", context)


def _stack(pages: Pages, operations: Operations, topic: Topic, message_id: str) -> dict[str, object]:
    stacks = operations.message_stacks(topic.name, short_id(message_id))
    quoted = quote(topic.name)
    return {
        "topic": topic,
        "heading": _("Stack"),
        "short": message_id.rpartition("~")[2][:8],
        "now_ms": stacks.now_ms,
        "lines": [_worker_stack(one, stacks.now_ms) for one in stacks.workers],
        "is_asked": any(one.asked_ms is not None for one in stacks.workers),
        "message_url": pages.url("message", quoted, message_id),
        "running_url": pages.url("running"),
        "urls": PageAddresses(
            act=pages.url("stack", quoted, message_id), live=pages.url("stack_live", quoted, message_id)
        ),
    }


def _worker_stack(one: WorkerStack, now_ms: int) -> dict[str, object]:
    return {
        "short": one.worker[:8],
        "host": visible(one.report.host),
        "pid": one.report.pid,
        "thread": visible(one.call.thread) if one.call else "",
        "since_ms": one.call.since_ms if one.call else None,
        "asked_ms": one.asked_ms,
        "is_awaited": one.is_awaited,
        "is_silent": one.is_awaited and now_ms - (one.asked_ms or 0) > SILENT_MS,
        "at_ms": one.stack.at_ms if one.stack else None,
        "text": visible(one.stack.text) if one.stack else "",
    }


def _ask(pages: Pages, request: HttpRequest, operations: Operations) -> HttpResponse:
    back = pages.url("workers")
    act = request.POST.get("act", "")
    asked = next((known for known in get_args(WorkerRequest) if act == known), None)
    try:
        if asked is None:
            raise OperationRefused(_("A worker can be asked to be quiet, to resume or to stop."))
        overview = operations.live_worker(request.POST.get("worker", ""))
        if asked != "resume" and "confirmed" not in request.POST:
            return pages.render(request, "topic/confirm.html", _question(operations, overview, asked, back))
        worker = operations.ask_worker(overview.stats.member.worker.id, asked)
        text = {
            "quiet": _(
                "Worker %(worker)s was asked to take no more messages. It does so within five seconds."
            ),
            "resume": _(
                "Worker %(worker)s was asked to take messages again. It does so within five seconds."
            ),
            "stop": _("Worker %(worker)s was asked to stop. It begins to within five seconds."),
        }[asked]
        messages.success(request, text % {"worker": worker[:8]})
    except OperationRefused as error:
        messages.error(request, str(error))
    return HttpResponseRedirect(back)


def _question(
    operations: Operations, reported: ReportedWorker, request_name: WorkerRequest, back: str
) -> dict[str, object]:
    worker, report = reported.stats.member.worker, reported.report
    assert report is not None
    conditions = [
        (_("Worker"), worker.id[:8]),
        (_("Host"), visible(worker.host)),
        (_("Process"), str(worker.pid)),
        (_("Messages held"), number(report.messages)),
    ]
    if request_name == "stop":
        heading, question = (
            _("Stop a worker"),
            _(
                "Stop the command of this worker? Running listeners may finish, as after SIGTERM; all processes of the "
                "command end. What has started the command may start it again."
            ),
        )
        pids = [one.report.pid for one in processes_of(operations.worker_overview(), report) if one.report]
        conditions.append((_("Processes that end"), ", ".join(map(str, sorted(pids)))))
    else:
        heading, question = (
            _("Quiet a worker"),
            _(
                "Let this worker take no more messages? It continues those that run, and other workers get its slots. A "
                "process that replaces it is not quiet."
            ),
        )
    return {
        "heading": heading,
        "question": question,
        "conditions": conditions,
        "carried": [("act", request_name), ("worker", worker.id)],
        "submit": _("Yes, do it"),
        "urls": PageAddresses(act=back),
        "back_url": back,
    }


def _running(pages: Pages, operations: Operations) -> dict[str, object]:
    running = operations.running_messages()
    lines = _calls(pages, operations, running)
    return {
        "heading": _("Running now"),
        "now_ms": running.now_ms,
        "lines": lines,
        "unlisted": running.unlisted,
        "shows_progress": any(one.call.progress is not None for one in running.messages),
        "has_actions": any(line["may_cancel"] or line["may_stack"] for line in lines),
        "workers_url": pages.url("workers"),
        "urls": PageAddresses(live=pages.url("running_live")),
    }


def _calls(pages: Pages, operations: Operations, running: RunningMessages) -> list[dict[str, object]]:
    lines = []
    for one in running.messages:
        call, usual = one.call, running.usual.get(one.call.topic)
        quoted = quote(call.topic)
        lines.append(
            {
                "topic": call.topic,
                "topic_url": f"{pages.url('change', quoted)}?tab=prepare",
                "id": call.id,
                "short": call.id.rpartition("~")[2][:8],
                "url": pages.url("message", quoted, call.id),
                "act_url": pages.url("act", quoted),
                "stack_url": pages.url("stack", quoted, call.id),
                "may_cancel": operations.may(one.topic, PERMISSION_OF["cancel"]),
                "may_stack": operations.may(one.topic, Permission.VIEW_STACK),
                "seconds": running.running_ms(one) / 1000,
                "p50_seconds": usual.p50_ms / 1000 if usual else None,
                "p99_seconds": usual.p99_ms / 1000 if usual else None,
                "is_unusual": running.is_unusual(one),
                "attempt": call.attempt,
                "percent": None if call.progress is None else math.floor(call.progress * 100),
                "progress_text": visible(call.progress_text),
                "thread": visible(call.thread),
                "worker": one.worker[:8],
                "host": visible(one.report.host),
                "pid": one.report.pid,
            }
        )
    return lines


def _context(pages: Pages, operations: Operations) -> dict[str, object]:
    overview = operations.worker_overview()
    known = operations.topics()
    return {
        "heading": _("Workers"),
        "now_ms": overview.now_ms,
        "workers": _lines(overview, set(known))[:WORKERS_SHOWN],
        "count": len(overview.workers),
        "hosts": len({one.stats.member.worker.host for one in overview.workers}),
        "threads": sum(one.stats.member.worker.threads for one in overview.workers),
        "taken": sum(one.report.taken for one in overview.workers if one.report),
        "vanished": [
            {"short": one.id[:8], "report": _shown(one.report), "at_ms": one.report.at_ms}
            for one in overview.vanished
        ],
        "unserved": [
            {"name": name, "url": pages.url("change", quote(name))}
            for name in overview.unserved[:TOPICS_NAMED]
        ],
        "more_unserved": max(0, len(overview.unserved) - TOPICS_NAMED),
        "running_url": pages.url("running"),
        "may_control": operations.actor.may(Permission.CONTROL_WORKERS),
        "act_url": pages.url("workers"),
        "urls": PageAddresses(live=pages.url("workers_live")),
    }


def _lines(overview: WorkerOverview, known: set[str]) -> list[dict[str, object]]:
    lines = []
    for one in overview.workers:
        worker = one.stats.member.worker
        names = sorted(known.intersection((*one.stats.slots, *one.stats.shared)))
        lines.append(
            {
                "id": worker.id,
                "short": worker.id[:8],
                "host": visible(worker.host),
                "pid": worker.pid,
                "since_ms": round(worker.started * 1000),
                "threads": worker.threads,
                "slots": sum(one.stats.slots.values()),
                "topics": names[:TOPICS_NAMED],
                "count": len(names),
                "more": max(0, len(names) - TOPICS_NAMED),
                "is_full": bool(worker.full),
                "report": _shown(one.report) if one.report else None,
            }
        )
    return lines


def _shown(report: WorkerReport) -> dict[str, object]:
    return {
        "host": visible(report.host),
        "pid": report.pid,
        "version": visible(report.version),
        "python": visible(report.python),
        "code": visible(report.code),
        "load": report.load,
        "memory": report.memory_mib,
        "taken": report.taken,
        "threads": report.threads,
        "messages": report.messages,
        "at_ms": report.at_ms,
        "state": report.state,
    }
