"""The addresses of the API: ``path("api/rmq/", include("django_rmq.api.urls"))``."""

from __future__ import annotations

from importlib.util import find_spec

from django.urls import URLPattern, URLResolver, path

from django_rmq.api import acts, deliveries, health, messages, topics

app_name = "rmq_api"

urlpatterns: list[URLPattern | URLResolver] = [
    path("topics/", topics.TopicsView.as_view(), name="topics"),
    path("topics/<str:topic>/", topics.TopicView.as_view(), name="topic"),
    path("topics/<str:topic>/messages/", messages.MessagesView.as_view(), name="messages"),
    path("topics/<str:topic>/messages/<str:id>/", messages.MessageView.as_view(), name="message"),
    path(
        "topics/<str:topic>/messages/<str:id>/replay/",
        acts.ReplayMessageView.as_view(),
        name="replay_message",
    ),
    path("topics/<str:topic>/messages/<str:id>/bury/", acts.BuryView.as_view(), name="bury"),
    path(
        "topics/<str:topic>/messages/<str:id>/reschedule/", acts.RescheduleView.as_view(), name="reschedule"
    ),
    path("topics/<str:topic>/replay/", acts.ReplayView.as_view(), name="replay"),
    path("topics/<str:topic>/purge/", acts.PurgeView.as_view(), name="purge"),
    path("topics/<str:topic>/pause/", acts.PauseView.as_view(), name="pause"),
    path("topics/<str:topic>/resume/", acts.ResumeView.as_view(), name="resume"),
    path("topics/<str:topic>/prepare/", deliveries.PrepareView.as_view(), name="prepare"),
    path("topics/<str:topic>/commit/", deliveries.CommitView.as_view(), name="commit"),
    path("topics/<str:topic>/rollback/", deliveries.RollbackView.as_view(), name="rollback"),
    path("topics/<str:topic>/extend/", deliveries.ExtendView.as_view(), name="extend"),
    path("topics/<str:topic>/release/", deliveries.ReleaseView.as_view(), name="release"),
    path("workers/", topics.WorkersView.as_view(), name="workers"),
    path("slots/", topics.SlotsView.as_view(), name="slots"),
    path("stats/", topics.StatsView.as_view(), name="stats"),
    path("health/live", health.LiveView.as_view(), name="live"),
    path("health/ready", health.ReadyView.as_view(), name="ready"),
]

if find_spec("prometheus_client") is not None:
    from django_rmq.api.scrape import metrics

    # Text for Prometheus, with its own token; not part of the API's schema.
    urlpatterns.append(path("metrics", metrics, name="metrics"))
