"""The addresses of the API: ``path("api/rmq/", include("django_rmq.api.urls"))``."""

from __future__ import annotations

from importlib.util import find_spec

from django.urls import URLPattern, URLResolver, path

from django_rmq.api import views

app_name = "rmq_api"

urlpatterns: list[URLPattern | URLResolver] = [
    path("topics/", views.TopicsView.as_view(), name="topics"),
    path("topics/<str:topic>/", views.TopicView.as_view(), name="topic"),
    path("topics/<str:topic>/messages/", views.MessagesView.as_view(), name="messages"),
    path("topics/<str:topic>/messages/<str:id>/", views.MessageView.as_view(), name="message"),
    path(
        "topics/<str:topic>/messages/<str:id>/replay/",
        views.ReplayMessageView.as_view(),
        name="replay_message",
    ),
    path("topics/<str:topic>/messages/<str:id>/bury/", views.BuryView.as_view(), name="bury"),
    path(
        "topics/<str:topic>/messages/<str:id>/reschedule/", views.RescheduleView.as_view(), name="reschedule"
    ),
    path("topics/<str:topic>/replay/", views.ReplayView.as_view(), name="replay"),
    path("topics/<str:topic>/purge/", views.PurgeView.as_view(), name="purge"),
    path("topics/<str:topic>/pause/", views.PauseView.as_view(), name="pause"),
    path("topics/<str:topic>/resume/", views.ResumeView.as_view(), name="resume"),
    path("topics/<str:topic>/prepare/", views.PrepareView.as_view(), name="prepare"),
    path("topics/<str:topic>/commit/", views.CommitView.as_view(), name="commit"),
    path("topics/<str:topic>/rollback/", views.RollbackView.as_view(), name="rollback"),
    path("topics/<str:topic>/extend/", views.ExtendView.as_view(), name="extend"),
    path("topics/<str:topic>/release/", views.ReleaseView.as_view(), name="release"),
    path("workers/", views.WorkersView.as_view(), name="workers"),
    path("slots/", views.SlotsView.as_view(), name="slots"),
    path("stats/", views.StatsView.as_view(), name="stats"),
    path("health/live", views.LiveView.as_view(), name="live"),
    path("health/ready", views.ReadyView.as_view(), name="ready"),
]

if find_spec("prometheus_client") is not None:
    from django_rmq.api.scrape import metrics

    # Text for Prometheus, with a token of its own: no part of the API's schema.
    urlpatterns.append(path("metrics", metrics, name="metrics"))
