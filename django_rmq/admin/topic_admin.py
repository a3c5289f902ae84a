"""Topics in the admin: the addresses of their pages, and the view behind each.

Every page is wrapped by the admin site, names the permissions that it needs, and shows a banner if Redis is
unavailable. ``django_rmq.operations`` decides what is permitted, and does and records it.
"""

from __future__ import annotations

from typing import Any

from django.contrib.admin.utils import quote
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path

from django_rmq.admin.labels import audited
from django_rmq.admin.views import (
    action_views,
    cause_views,
    dashboard,
    export_views,
    message_views,
    outbox_views,
    schedule_views,
    server_views,
    topic_views,
    worker_views,
)
from django_rmq.admin.views.page import Pages, View, topic_page
from django_rmq.core.model.topic import Topic
from django_rmq.operations import Operations, Permission


class TopicAdmin(Pages):
    """The pages of RMQ."""

    changelist_view = dashboard.changelist_view
    dashboard_live_view, pin_view = dashboard.live_view, dashboard.pin_view
    change_view = topic_views.change_view
    topic_live_view, limits_view = topic_views.live_view, topic_views.limits_view
    export_view = export_views.export_view
    message_view, raw_view = message_views.message_view, message_views.raw_view
    search_view = message_views.search_view
    edit_view, send_view = message_views.edit_view, message_views.send_view
    act_view = action_views.act_view
    causes_view, topic_causes_view = cause_views.causes_view, cause_views.topic_causes_view
    claims_view = topic_views.claims_view
    outbox_view, servers_view = outbox_views.outbox_view, server_views.servers_view
    schedules_view, schedule_view = schedule_views.schedules_view, schedule_views.schedule_view

    background_view, undo_view = action_views.background_view, action_views.undo_view
    background_live_view = action_views.background_live_view
    workers_view, workers_live_view = worker_views.workers_view, worker_views.workers_live_view
    running_view, running_live_view = worker_views.running_view, worker_views.running_live_view
    stack_view, stack_live_view = worker_views.stack_view, worker_views.stack_live_view

    def get_urls(self) -> list[URLPattern]:
        """Return the addresses of all pages, each behind the admin site."""

        def at(route: str, view: View, name: str) -> URLPattern:
            return path(route, self.admin_site.admin_view(view), name=f"django_rmq_topic_{name}")

        return [
            at("", self.changelist_view, "changelist"),
            at("live/", self.dashboard_live_view, "dashboard_live"),
            at("servers/", self.servers_view, "servers"),
            at("outbox/", self.outbox_view, "outbox"),
            at("workers/", self.workers_view, "workers"),
            at("workers/live/", self.workers_live_view, "workers_live"),
            at("background/", self.background_view, "background"),
            at("background/live/", self.background_live_view, "background_live"),
            at("undo/", self.undo_view, "undo"),
            at("running/", self.running_view, "running"),
            at("running/live/", self.running_live_view, "running_live"),
            at("causes/", self.causes_view, "causes"),
            at("search/", self.search_view, "search"),
            at("schedules/", self.schedules_view, "schedules"),
            at("schedules/<str:object_id>/", self.schedule_view, "schedule"),
            at("<str:object_id>/change/", self.change_view, "change"),
            at("<str:object_id>/live/", self.topic_live_view, "live"),
            at("<str:object_id>/pin/", self.pin_view, "pin"),
            at("<str:object_id>/history/", self.history_view, "history"),
            at("<str:object_id>/send/", self.send_view, "send"),
            at("<str:object_id>/act/", self.act_view, "act"),
            at("<str:object_id>/limits/", self.limits_view, "limits"),
            at("<str:object_id>/export/", self.export_view, "export"),
            at("<str:object_id>/causes/", self.topic_causes_view, "topic_causes"),
            at("<str:object_id>/claims/", self.claims_view, "claims"),
            at("<str:object_id>/message/<str:message_id>/", self.message_view, "message"),
            at("<str:object_id>/message/<str:message_id>/raw/", self.raw_view, "raw"),
            at("<str:object_id>/message/<str:message_id>/stack/", self.stack_view, "stack"),
            at("<str:object_id>/message/<str:message_id>/stack/live/", self.stack_live_view, "stack_live"),
            at("<str:object_id>/message/<str:message_id>/edit/", self.edit_view, "edit"),
        ]

    @topic_page(Permission.VIEW)
    def history_view(
        self,
        request: HttpRequest,
        operations: Operations,
        topic: Topic,
        extra_context: dict[str, object] | None = None,
    ) -> HttpResponse:
        """Show the actions of users on a topic, like Django's own page, in the language of the reader."""
        response = super().history_view(request, quote(topic.name), extra_context)
        if isinstance(response, TemplateResponse) and response.context_data:
            for entry in response.context_data["action_list"]:
                entry.change_message = audited(entry.change_message)
        return response

    def get_paginator(self, request: HttpRequest, queryset: Any, *args: Any, **kwargs: Any) -> Paginator:  # type: ignore[type-arg]
        """Page through the history, the newest first."""
        return super().get_paginator(request, queryset.order_by("-action_time", "-pk"), *args, **kwargs)
