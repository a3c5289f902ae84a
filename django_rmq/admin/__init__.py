"""RMQ in the Django admin: topics, their messages, and the actions of people on them; here the addresses of all pages.

Every page is wrapped by the admin site, names the permissions that it needs, and shows a banner if Redis is
unavailable. ``django_rmq.operations`` decides what is permitted, and does and records it.
A project's own ``AdminSite`` registers the same two: ``site.register(Topic, TopicAdmin)``.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.http import HttpRequest
from django.urls import URLPattern, path, register_converter

from django_rmq.admin import (
    action_views,
    cause_views,
    claim_views,
    dashboard,
    export_views,
    message_views,
    outbox_views,
    schedule_views,
    server_views,
    topic_views,
    worker_views,
)
from django_rmq.admin.page import Pages, TopicConverter, View
from django_rmq.models import Topic

register_converter(TopicConverter, "rmq_topic")


class TopicAdmin(Pages):
    """The pages of RMQ."""

    def get_urls(self) -> list[URLPattern]:
        """Return the addresses of all pages, each behind the admin site."""

        def at(route: str, view: View, name: str) -> URLPattern:
            bound = MethodType(view, self)
            return path(route, self.admin_site.admin_view(bound), name=f"django_rmq_topic_{name}")

        return [
            # Django's index and its log of actions find the pages `changelist` and `change` by these names.
            at("", dashboard.changelist_view, "changelist"),
            at("live/", dashboard.live_view, "dashboard_live"),
            at("servers/", server_views.servers_view, "servers"),
            at("outbox/", outbox_views.outbox_view, "outbox"),
            at("workers/", worker_views.workers_view, "workers"),
            at("workers/live/", worker_views.workers_live_view, "workers_live"),
            at("background/", action_views.background_view, "background"),
            at("background/live/", action_views.background_live_view, "background_live"),
            at("undo/", action_views.undo_view, "undo"),
            at("running/", worker_views.running_view, "running"),
            at("running/live/", worker_views.running_live_view, "running_live"),
            at("causes/", cause_views.causes_view, "causes"),
            at("search/", message_views.search_view, "search"),
            at("schedules/", schedule_views.schedules_view, "schedules"),
            at("schedules/<str:object_id>/", schedule_views.schedule_view, "schedule"),
            at("<rmq_topic:object_id>/change/", topic_views.change_view, "change"),
            at("<rmq_topic:object_id>/live/", topic_views.live_view, "live"),
            at("<rmq_topic:object_id>/pin/", dashboard.pin_view, "pin"),
            at("<rmq_topic:object_id>/history/", topic_views.history_view, "history"),
            at("<rmq_topic:object_id>/send/", message_views.send_view, "send"),
            at("<rmq_topic:object_id>/act/", action_views.act_view, "act"),
            at("<rmq_topic:object_id>/limits/", topic_views.limits_view, "limits"),
            at("<rmq_topic:object_id>/export/", export_views.export_view, "export"),
            at("<rmq_topic:object_id>/causes/", cause_views.topic_causes_view, "topic_causes"),
            at("<rmq_topic:object_id>/claims/", claim_views.claims_view, "claims"),
            at("<rmq_topic:object_id>/message/<str:message_id>/", message_views.message_view, "message"),
            at("<rmq_topic:object_id>/message/<str:message_id>/raw/", message_views.raw_view, "raw"),
            at("<rmq_topic:object_id>/message/<str:message_id>/stack/", worker_views.stack_view, "stack"),
            at(
                "<rmq_topic:object_id>/message/<str:message_id>/stack/live/",
                worker_views.stack_live_view,
                "stack_live",
            ),
            at("<rmq_topic:object_id>/message/<str:message_id>/edit/", message_views.edit_view, "edit"),
        ]

    def get_paginator(self, request: HttpRequest, queryset: Any, *args: Any, **kwargs: Any) -> Paginator:  # type: ignore[type-arg]
        """Page through the history, the newest first."""
        return super().get_paginator(request, queryset.order_by("-action_time", "-pk"), *args, **kwargs)


admin.site.register(Topic, TopicAdmin)

__all__ = ["TopicAdmin"]
