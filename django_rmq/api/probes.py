"""Probes: whether this process answers, and whether all is well."""

from __future__ import annotations

import threading
import time

from rest_framework import serializers
from rest_framework.permissions import AllowAny, BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView

from django_rmq.api import requests
from django_rmq.api.requests import Fields
from django_rmq.api.view import Json, ResponseSerializer, RmqView, check_size, maybe, route
from django_rmq.operations import Actor, Health, Operations, Permission
from django_rmq.operations.health import HealthThresholds


class LiveAnswer(ResponseSerializer):
    """This process answers."""

    ok = serializers.BooleanField()


class FindingAnswer(ResponseSerializer):
    """The result of one check."""

    check = serializers.CharField()
    topic = maybe(serializers.CharField)
    ok = serializers.BooleanField(help_text="False: trouble, for which the whole answer is 503")
    severity = serializers.ChoiceField(["ok", "note", "bad"])
    text = serializers.CharField()


class ReadyAnswer(ResponseSerializer):
    """Whether all checks passed. Only users with the permission view_topic get findings, worst first."""

    ok = serializers.BooleanField()
    findings = FindingAnswer(many=True, required=False)


READY_SECONDS = 1.0
"""Maximum age in seconds of an answer for clients without a login."""


class PublicView(RmqView):
    """A route for probes, without a login."""

    def initial(self, request: Request, *args: object, **kwargs: object) -> None:
        """Check only the size and the accepted formats."""
        check_size(request.META)
        APIView.initial(self, request, *args, **kwargs)

    def get_permissions(self) -> list[BasePermission]:
        return [AllowAny()]

    def get_throttles(self) -> list[BaseThrottle]:
        """Return no throttles for clients without a login, because a process whose probe is refused gets killed."""
        is_known = getattr(self.request.user, "is_authenticated", False)
        return super().get_throttles() if is_known else []


class LiveView(PublicView):
    # To find out who asks may need a database, whose failure must not get this process killed.
    authentication_classes = ()

    @route("live", answers={200: LiveAnswer}, public=True)
    def get(self) -> Json:
        """Answer that this process is alive."""
        return {"ok": True}


class _Ready:
    """The last findings, for clients that may only learn yes or no."""

    def __init__(self) -> None:
        self._config: object = None
        self._until = 0.0
        self._found: Health | None = None
        self._checking = threading.Lock()

    def recent_health(self) -> Health:
        """Return the findings of the last second, or check again.

        While a server hangs, one request waits for it, and the others get the findings before that.
        """
        probe = Operations(Actor("probe", "rest"))
        config = probe.config
        readiness = self._found if self._config is config else None
        if readiness is not None and time.monotonic() < self._until:
            return readiness
        if readiness is None:
            self._checking.acquire()
        elif not self._checking.acquire(blocking=False):
            return readiness
        try:
            if readiness is None and self._found is not None and self._config is config:
                return self._found  # of the request for which this one has waited
            # Without topics, because clients without a login must not make the server count all slots.
            health = probe.health(HealthThresholds(needs_workers=False), ())
            self._config, self._found, self._until = config, health, time.monotonic() + READY_SECONDS
            return health
        finally:
            self._checking.release()


_ready = _Ready()


class ReadyView(PublicView):
    @route(
        "ready",
        query=requests.HealthQuery,
        answers={200: ReadyAnswer, 503: ReadyAnswer},
        errors=[401, 403, 429],
        public=True,
    )
    def get(self, query: Fields) -> Response:
        """Check that Redis answers and takes writes, and that slots are assigned.

        Users with the permission view_topic get the findings and may set limits. What is late, dead or paused
        without a limit is a note, which does not change the status.
        """
        more: Json = {}
        if self.operations.actor.may(Permission.VIEW):
            topics, needs_workers = self.known(), query.pop("workers")
            limits = HealthThresholds(needs_workers=needs_workers, **query)
            health = self.operations.health(limits, topics)
            known = {"", *topics}
            more["findings"] = [one.as_json() for one in health.findings if one.topic in known]
        elif self.request.query_params:
            self.permission_denied(self.request, "Only users with the permission view_topic may set limits.")
        else:
            health = _ready.recent_health()
        response = Response({"ok": health.is_well, **more}, status=200 if health.is_well else 503)
        if not health.is_well:
            response["Retry-After"] = "2"
        return response
