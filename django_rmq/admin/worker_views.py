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

from django_rmq.admin.body_display import readable, visible
from django_rmq.admin.page import Pages, live_page, short_id, topic_page
from django_rmq.core.model.topic import Topic
from django_rmq.core.model.worker_report import WorkerRequest
from django_rmq.exceptions import InvalidRequest, OperationRefused
from django_rmq.operations import Operations, Permission, RunningMessages
from django_rmq.operations.authorization import PERMISSION_OF
from django_rmq.operations.worker_overview import ReportedWorker, RunningMessage, processes_of
from django_rmq.templatetags.rmq_format import number

WORKERS_SHOWN = 500
"""The number of workers on the page."""

SILENT_MS = 15_000
"""Milliseconds after a request for a stack from which the page says why there may be no answer."""

TOPICS_NAMED = 50
"""The number of topics named in a cell or a list."""


def _stack(
    pages: Pages, request: HttpRequest, operations: Operations, topic: Topic, message_id: str
) -> dict[str, object]:
    try:
        stacks = operations.message_stacks(topic.name, short_id(message_id))
    except InvalidRequest as error:
        raise Http404(str(error)) from error
    quoted = quote(topic.name)
    return {
        "topic": topic,
        "heading": _("Stack"),
        "short": short_of(message_id),
        "now_ms": stacks.now_ms,
        "lines": [
            {
                "row": one,
                "report": readable(one.report),
                "thread": visible(one.call.thread) if one.call else "",
                "is_silent": one.is_awaited and stacks.now_ms - (one.asked_ms or 0) > SILENT_MS,
                "text": visible(one.stack.text) if one.stack else "",
            }
            for one in stacks.workers
        ],
        "is_asked": any(one.asked_ms is not None for one in stacks.workers),
        "message_url": pages.url("message", quoted, message_id),
        "running_url": pages.url("running"),
        "urls": {
            "act": pages.url("stack", quoted, message_id),
            "live": pages.url("stack_live", quoted, message_id),
        },
    }


def short_of(message_id: str) -> str:
    """Return the beginning of the part of a sealed id that names the message."""
    return message_id.rpartition("~")[2][:8]


def _ask_for_stack(
    pages: Pages, request: HttpRequest, operations: Operations, topic: Topic, message_id: str
) -> HttpResponse:
    try:
        operations.ask_for_stacks(topic.name, short_id(message_id))
    except InvalidRequest as error:
        raise Http404(str(error)) from error
    except OperationRefused as error:
        messages.error(request, str(error))
    return HttpResponseRedirect(request.path)


stack_view, stack_live_view = live_page(
    _stack,
    "topic/stack.html",
    "topic/_stack.html",
    act=_ask_for_stack,
    guard=topic_page(Permission.VIEW, Permission.VIEW_STACK),
)


def _ask(pages: Pages, request: HttpRequest, operations: Operations) -> HttpResponse:
    back = pages.url("workers")
    act = request.POST.get("act", "")
    asked = next((known for known in get_args(WorkerRequest) if act == known), None)
    try:
        if asked is None:
            raise OperationRefused(_("A worker can be asked to be quiet, to resume or to stop."))
        overview = operations.live_worker(request.POST.get("worker", ""))
        if asked != "resume" and "confirmed" not in request.POST:
            return _confirm(pages, request, operations, overview, asked)
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


def _confirm(
    pages: Pages, request: HttpRequest, operations: Operations, reported: ReportedWorker, asked: WorkerRequest
) -> HttpResponse:
    worker, report, back = reported.stats.member.worker, reported.report, pages.url("workers")
    assert report is not None
    conditions = [
        (_("Worker"), worker.id[:8]),
        (_("Host"), visible(worker.host)),
        (_("Process"), str(worker.pid)),
        (_("Messages held"), number(report.messages)),
    ]
    if asked == "stop":
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
    carried = [("act", asked), ("worker", worker.id)]
    return pages.confirm_page(
        request, question, carried, act=back, back_url=back, heading=heading, conditions=conditions
    )


def _running(pages: Pages, request: HttpRequest, operations: Operations) -> dict[str, object]:
    running = operations.running_messages()
    lines = [_call_line(pages, operations, running, one) for one in running.messages]
    return {
        "heading": _("Running now"),
        "now_ms": running.now_ms,
        "lines": lines,
        "unlisted": running.unlisted,
        "shows_progress": any(one.call.progress is not None for one in running.messages),
        "has_actions": any(line["may_cancel"] or line["may_stack"] for line in lines),
        "workers_url": pages.url("workers"),
        "urls": {"live": pages.url("running_live")},
    }


running_view, running_live_view = live_page(_running, "topic/running.html", "topic/_running.html")


def _call_line(
    pages: Pages, operations: Operations, running: RunningMessages, one: RunningMessage
) -> dict[str, object]:
    call, usual, quoted = one.call, running.usual.get(one.call.topic), quote(one.call.topic)
    return {
        "row": one,
        "call": readable(call),
        "report": readable(one.report),
        "short": short_of(call.id),
        "topic_url": f"{pages.url('change', quoted)}?tab=prepare",
        "url": pages.url("message", quoted, call.id),
        "act_url": pages.url("act", quoted),
        "stack_url": pages.url("stack", quoted, call.id),
        "may_cancel": operations.may(one.topic, PERMISSION_OF["cancel"]),
        "may_stack": operations.may(one.topic, Permission.VIEW_STACK),
        "seconds": running.running_ms(one) / 1000,
        "p50_seconds": usual.p50_ms / 1000 if usual else None,
        "p99_seconds": usual.p99_ms / 1000 if usual else None,
        "is_unusual": running.is_unusual(one),
        "percent": None if call.progress is None else math.floor(call.progress * 100),
    }


def _workers(pages: Pages, request: HttpRequest, operations: Operations) -> dict[str, object]:
    overview = operations.worker_overview()
    known, may_control = set(operations.topics()), operations.actor.may(Permission.CONTROL_WORKERS)
    return {
        "heading": _("Workers"),
        "now_ms": overview.now_ms,
        "workers": [_worker_line(one, known, may_control) for one in overview.workers[:WORKERS_SHOWN]],
        "count": len(overview.workers),
        "hosts": len({one.stats.member.worker.host for one in overview.workers}),
        "threads": sum(one.stats.member.worker.threads for one in overview.workers),
        "taken": sum(one.report.taken for one in overview.workers if one.report),
        "vanished": [one._replace(report=readable(one.report)) for one in overview.vanished],
        "unserved": [
            {"name": name, "url": pages.url("change", quote(name))}
            for name in overview.unserved[:TOPICS_NAMED]
        ],
        "more_unserved": max(0, len(overview.unserved) - TOPICS_NAMED),
        "running_url": pages.url("running"),
        "may_control": may_control,
        "act_url": pages.url("workers"),
        "urls": {"live": pages.url("workers_live")},
    }


workers_view, workers_live_view = live_page(_workers, "topic/workers.html", "topic/_workers.html", act=_ask)


def _worker_line(one: ReportedWorker, known: set[str], may_control: bool) -> dict[str, object]:
    worker = one.stats.member.worker
    names = sorted(known.intersection((*one.stats.slots, *one.stats.shared)))
    return {
        "worker": worker,
        "host": visible(worker.host),
        "may_control": may_control and not one.serves_others,
        "report": readable(one.report) if one.report else None,
        "since_ms": round(worker.started * 1000),
        "slots": sum(one.stats.slots.values()),
        "topics": names[:TOPICS_NAMED],
        "count": len(names),
        "more": max(0, len(names) - TOPICS_NAMED),
    }
