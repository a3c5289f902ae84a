"""The operations on topics and messages: the single implementation behind the admin, the commands and REST.

An ``Operations`` belongs to an actor, checks its permissions, works in bounded steps, and records what it
does. The admin, commands and REST only translate input and output. If two people do something at the same
time, the second one gets the state that it found.

    operations = Operations(Actor.of_user(request.user, "admin"))
    for progress in operations.replay_all("orders", Filter(error="ConnectionError")):
        print(progress.done, progress.total, progress.outcomes)

Everything raises ``UnknownTopic``, ``NotPermitted`` and ``ServerTrouble``.
"""

from __future__ import annotations

from django_rmq.core.telling.history import Minute
from django_rmq.operations import claims as claiming
from django_rmq.operations import (
    editing,
    looking,
    named,
    reading,
    sending,
    sweeping,
    tracking,
    wait_reasons,
)
from django_rmq.operations import groups as grouped
from django_rmq.operations import outbox as outboxes
from django_rmq.operations import schedules as scheduled
from django_rmq.operations.actors import Actor, Permission, Trace
from django_rmq.operations.claims import ClaimFigures
from django_rmq.operations.copies import Copy
from django_rmq.operations.crew import WorkerFigures
from django_rmq.operations.deliveries import Deliveries, deliveries_of
from django_rmq.operations.desk import Desk
from django_rmq.operations.figures import Overview, SlotFigures, SlotsFigures, TopicFigures
from django_rmq.operations.filters import Filter
from django_rmq.operations.flow import Flow
from django_rmq.operations.groups import Group, Groups
from django_rmq.operations.health import Health, check_health, read_servers
from django_rmq.operations.listing import Listing
from django_rmq.operations.measuring import Measured, Measurement
from django_rmq.operations.named import MAX_IDS, Done
from django_rmq.operations.outbox import OutboxRow, Waiting
from django_rmq.operations.reading import not_found
from django_rmq.operations.retiring import Stranded
from django_rmq.operations.runs import Limits, Progress, Run
from django_rmq.operations.schedules import ScheduleFigures
from django_rmq.operations.tracking import Followed
from django_rmq.operations.wait_reasons import Hold
from django_rmq.project.ids import Identity, identify


class Operations(Desk):
    """Everything that ``actor`` may see and do. ``purpose`` selects the connections.

    ``trace``: the operations are one action of several requests, and are recorded as one. Each operation is a
    function of one of the modules named here: it gets the ``Desk``, and checks its permission first.
    """

    overview, survey, topic, slots = looking.overview, looking.survey, looking.topic, looking.slots
    shared_survey = looking.shared_survey
    shared_outbox, shared_schedules = looking.shared_outbox, looking.shared_schedules
    shared_servers, shared_flow = looking.shared_servers, looking.shared_flow
    flow, measured, workers, health = looking.flow, looking.measured, looking.workers, check_health
    history, last_minutes, events = looking.history, looking.last_minutes, looking.events
    servers = read_servers
    stranded, find_stranded = looking.stranded, looking.find_stranded

    listing, get, body, sent_id = reading.listing, reading.get, reading.body, reading.sent_id
    groups, holds = grouped.groups, wait_reasons.holds
    follow, status = tracking.follow, tracking.status

    send, send_many, send_each = sending.send, sending.send_many, sending.send_each
    cancel_sent, ensure = sending.cancel_sent, sending.ensure
    spend_sends, once = sending.spend_sends, sending.once

    outbox, outbox_as_known, outbox_rows = outboxes.outbox, outboxes.outbox_as_known, outboxes.outbox_rows
    relay_outbox, relay_duties = outboxes.relay_outbox, outboxes.relay_duties
    retry_outbox, delete_outbox = outboxes.retry_outbox, outboxes.delete_outbox

    schedules, schedule, run_schedule = scheduled.schedules, scheduled.schedule, scheduled.run_schedule
    pause_schedule, resume_schedule = scheduled.pause_schedule, scheduled.resume_schedule
    edit_schedule, reset_schedule = scheduled.edit_schedule, scheduled.reset_schedule
    delete_schedule = scheduled.delete_schedule

    deliveries = deliveries_of

    claims, return_claims = claiming.claims, claiming.return_claims

    id_of = named.id_of
    replay, bury, reschedule = named.replay, named.bury, named.reschedule
    delete, delete_only, cancel = named.delete, named.delete_only, named.cancel
    replay_edited = editing.replay_edited

    replay_all, delete_all, bury_all = sweeping.replay_all, sweeping.delete_all, sweeping.bury_all
    reschedule_all = sweeping.reschedule_all
    purge, pause, resume, retire = sweeping.purge, sweeping.pause, sweeping.resume, sweeping.retire


__all__ = [
    "MAX_IDS",
    "Actor",
    "ClaimFigures",
    "Copy",
    "Deliveries",
    "Done",
    "Filter",
    "Flow",
    "Followed",
    "Group",
    "Groups",
    "Health",
    "Hold",
    "Identity",
    "Limits",
    "Listing",
    "Measured",
    "Measurement",
    "Minute",
    "Operations",
    "OutboxRow",
    "Overview",
    "Permission",
    "Progress",
    "Run",
    "ScheduleFigures",
    "SlotFigures",
    "SlotsFigures",
    "Stranded",
    "TopicFigures",
    "Trace",
    "Waiting",
    "WorkerFigures",
    "identify",
    "not_found",
]
