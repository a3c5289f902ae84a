"""The addresses of the API: ``path("api/rmq/", include("django_rmq.api.urls"))``.

Every route ends with a slash, and is found below ``v1/``. Without ``v1/`` the same routes answer as version 1.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from django.http import HttpResponseBase
from django.urls import URLPattern, URLResolver, include, path

from django_rmq.api import actions, deliveries, messages, probes, schedules, topics, workers
from django_rmq.api.view import RmqView

app_name = "rmq_api"

TOPIC = "topics/<str:topic>/"
SCHEDULE = "schedules/<str:name>/"
WORKER = "workers/<str:worker>/"
MESSAGE = f"{TOPIC}messages/<str:id>/"

ROUTES: dict[str, tuple[str, type[RmqView]]] = {
    "topics": ("topics/", topics.TopicsView),
    "topic": (TOPIC, topics.TopicView),
    "messages": (f"{TOPIC}messages/", messages.MessagesView),
    "message": (MESSAGE, messages.MessageView),
    "replay_message": (f"{MESSAGE}replay/", actions.ReplayMessageView),
    "bury": (f"{MESSAGE}bury/", actions.BuryView),
    "cancel": (f"{MESSAGE}cancel/", actions.CancelView),
    "stack": (f"{MESSAGE}stack/", workers.StackView),
    "reschedule": (f"{MESSAGE}reschedule/", actions.RescheduleView),
    "replay": (f"{TOPIC}replay/", actions.ReplayView),
    "reschedule_all": (f"{TOPIC}reschedule/", actions.RescheduleAllView),
    "purge": (f"{TOPIC}purge/", actions.PurgeView),
    "pause": (f"{TOPIC}pause/", actions.PauseView),
    "resume": (f"{TOPIC}resume/", actions.ResumeView),
    "limits": (f"{TOPIC}limits/", topics.LimitsView),
    "prepare": (f"{TOPIC}prepare/", deliveries.PrepareView),
    "commit": (f"{TOPIC}commit/", deliveries.CommitView),
    "rollback": (f"{TOPIC}rollback/", deliveries.RollbackView),
    "extend": (f"{TOPIC}extend/", deliveries.ExtendView),
    "release": (f"{TOPIC}release/", deliveries.ReleaseView),
    "schedules": ("schedules/", schedules.SchedulesView),
    "pause_schedule": (f"{SCHEDULE}pause/", schedules.PauseScheduleView),
    "resume_schedule": (f"{SCHEDULE}resume/", schedules.ResumeScheduleView),
    "run_schedule": (f"{SCHEDULE}run/", schedules.RunScheduleView),
    "workers": ("workers/", workers.WorkersView),
    "quiet_worker": (f"{WORKER}quiet/", workers.QuietWorkerView),
    "resume_worker": (f"{WORKER}resume/", workers.ResumeWorkerView),
    "stop_worker": (f"{WORKER}stop/", workers.StopWorkerView),
    "background": ("background/", actions.BackgroundView),
    "start_action": (f"{TOPIC}background/", actions.StartActionView),
    "stop_action": ("background/<str:action>/stop/", actions.StopActionView),
    "deletions": ("deletions/", actions.DeletionsView),
    "undo": ("deletions/<str:deletion>/undo/", actions.UndoView),
    "running": ("running/", workers.RunningView),
    "causes": ("causes/", messages.CausesView),
    "slots": ("slots/", topics.SlotsView),
    "stats": ("stats/", topics.StatsView),
    "live": ("health/live/", probes.LiveView),
    "ready": ("health/ready/", probes.ReadyView),
}
"""Name → path and view."""


def _patterns(**options: None) -> list[URLPattern]:
    """Return the patterns of all routes. ``options``: attributes of the views."""
    patterns = [path(route, view.as_view(**options), name=name) for name, (route, view) in ROUTES.items()]
    # A probe or a scraper would take the redirect to the slash for a success.
    bare: list[tuple[str, Callable[..., HttpResponseBase]]] = [
        ("health/live", probes.LiveView.as_view(schema=None)),
        ("health/ready", probes.ReadyView.as_view(schema=None)),
    ]
    if find_spec("prometheus_client") is not None:
        from django_rmq.api.metrics_view import metrics

        # Text for Prometheus, with its own token; not part of the API's schema.
        patterns.append(path("metrics/", metrics, name="metrics"))
        bare.append(("metrics", metrics))
    return patterns + [path(route, view) for route, view in bare]


urlpatterns: list[URLPattern | URLResolver] = [
    *_patterns(schema=None),
    # The last one of a name is what reverse() returns.
    path("v1/", include(_patterns())),
]
