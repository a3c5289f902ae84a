"""A check for django-health-check 4 (extra ``health``): the checks of ``rmqhealth``, with the limits that you give.

Without a limit it does not fail for lateness, as ``rmqhealth`` does with its default limits.

    from health_check.views import HealthCheckView

    path("health/", HealthCheckView.as_view(checks=["django_rmq.health_check.RmqHealthCheck"]))

The address at which workers themselves answer probes (HEALTH_ADDRESS) is the part of ``core.worker_processes.supervisor``.

With limits: ``checks=[("django_rmq.health_check.RmqHealthCheck", {"max_age": 600, "max_dead": 1000})]``.
"""

from __future__ import annotations

import dataclasses
import logging

from health_check.base import HealthCheck
from health_check.exceptions import ServiceUnavailable, ServiceWarning

from django_rmq.exceptions import RmqError
from django_rmq.operations import Actor, Operations
from django_rmq.operations.health import Finding, HealthThresholds

logger = logging.getLogger("django_rmq.health")

FATAL = ("redis", "writes", "unreadable", "coordinator", "workers")
"""Checks without which nothing is delivered; the others are warnings."""

_SHORT = {"unreadable": "some slots cannot be read", "definition": "its definition cannot be read"}


@dataclasses.dataclass
class RmqHealthCheck(HealthCheck):  # type: ignore[misc]
    """Redis answers and takes writes, topics with a listener have workers, nothing is too late or too often dead."""

    max_age: float | None = None
    """Maximum seconds for which the oldest message of a topic may have been due, or a slot of a priority
    topic not been empty. None: not checked."""
    max_dead: int | None = None
    """Maximum number of dead messages of a topic. None: not checked."""
    needs_workers: bool = True
    """Whether every topic with a listener must have a live worker."""
    max_outbox_age: float | None = None
    """Maximum seconds for which a message may have been in the outbox. None: not checked."""
    max_schedule_lateness: float | None = None
    """Maximum seconds by which a schedule may be late. None: not checked."""
    max_running: float | None = None
    """Maximum seconds for which the longest delivery of a topic may have run. None: not checked."""
    topics: tuple[str, ...] | None = None
    """Check only these topics. None: all."""

    def run(self) -> None:
        """Raise ``ServiceUnavailable`` or ``ServiceWarning`` with all troubles."""
        limits = HealthThresholds(
            max_age=self.max_age,
            max_dead=self.max_dead,
            needs_workers=self.needs_workers,
            max_outbox_age=self.max_outbox_age,
            max_schedule_lateness=self.max_schedule_lateness,
            max_running=self.max_running,
        )
        try:
            health = Operations(Actor("health check", "health")).health(limits, self.topics)
        except RmqError as error:
            # Anyone may read a probe, and the text of the error may quote a server.
            raise ServiceUnavailable("RMQ cannot be checked") from error
        if health.is_well:
            return
        troubles = health.troubles
        logger.warning(
            "RMQ is unhealthy: %s", "; ".join(f"{one.topic} {one.text}".strip() for one in troubles)
        )
        sentences = "; ".join(_public_text(finding) for finding in troubles)
        kind = ServiceUnavailable if any(one.name in FATAL for one in troubles) else ServiceWarning
        raise kind(sentences)


def _public_text(finding: Finding) -> str:
    """Return a finding for everyone: replies of a server stay in the log."""
    if finding.name == "writes":
        return "Redis refuses writes"
    if finding.runbook == "rmqunreadable":
        return f"{finding.topic}: cannot be read"
    if not finding.topic:
        return f"{finding.name} is unhealthy"
    return f"{finding.topic}: {_SHORT.get(finding.name, finding.text)}"


__all__ = ["RmqHealthCheck"]
