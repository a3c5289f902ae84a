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

from django_rmq.core.model.stored_actions import Deletion
from django_rmq.core.monitoring.history import Minute, SummedMinute
from django_rmq.message_ids import MessageIdentity, identify
from django_rmq.operations import (
    actions,
    bulk_actions,
    measurements,
    message_details,
    messages,
    sends,
    shared_reads,
    stats,
    topics,
    undeclared_topics,
    undo,
)
from django_rmq.operations import claims as claiming
from django_rmq.operations import message_groups as grouped
from django_rmq.operations import outbox as outboxes
from django_rmq.operations import schedules as scheduled
from django_rmq.operations.actions import MAX_IDS, ActionResult
from django_rmq.operations.audit_trail import record_outcomes, recorded
from django_rmq.operations.authorization import (
    Actor,
    OperationContext,
    Permission,
    TopicRule,
    Trace,
    topic_permission,
)
from django_rmq.operations.bulk import BulkProgress, BulkRun, Limits
from django_rmq.operations.claims import ClaimStats
from django_rmq.operations.consumption import Deliveries, deliveries_of
from django_rmq.operations.filters import Filter
from django_rmq.operations.health import Health, check_health, shared_health, slow_commands
from django_rmq.operations.measurements import Annotation, Measurement, TopicMetrics
from django_rmq.operations.message_details import Followed, Hold, not_found
from django_rmq.operations.message_groups import Causes, GroupSample, MessageGroup, MessageGroups
from django_rmq.operations.message_view import MessageCopy
from django_rmq.operations.messages import Listing, SearchResult
from django_rmq.operations.outbox import OutboxRow
from django_rmq.operations.schedules import ScheduleStats
from django_rmq.operations.stats import (
    Overview,
    SlotsStats,
    SlotStats,
    TopicCounters,
    TopicStats,
    WorkerStats,
)
from django_rmq.operations.topics import TopicCard, TopicLimits
from django_rmq.operations.undeclared_topics import UndeclaredTopic
from django_rmq.operations.worker_overview import (
    MessageStacks,
    RunningMessages,
    WorkerOverview,
    WorkerStack,
    ask_for_stacks,
    ask_worker,
    live_worker,
    message_stacks,
    running_messages,
    worker_overview,
)
from django_rmq.outbox.row_lists import Waiting


class Operations(OperationContext):
    """Everything that ``actor`` may see and do. ``purpose`` selects the connections.

    ``trace``: the operations are one action of several requests, and are recorded as one. Each operation is a
    function of one of the modules named here: it gets the ``OperationContext``, and checks its permission first.
    """

    overview, survey = stats.overview, stats.survey
    topic, flow = stats.topic, stats.flow
    slots, workers = stats.slots, stats.workers
    shared_survey, shared_flow = shared_reads.shared_survey, shared_reads.shared_flow
    shared_outbox, shared_schedules = shared_reads.shared_outbox, shared_reads.shared_schedules
    health, shared_health, slow_commands = check_health, shared_health, slow_commands
    servers, shared_servers = shared_reads.read_servers, shared_reads.shared_servers
    topic_card, topic_limits = topics.topic_card, topics.topic_limits
    change_limits, reset_limits = topics.change_limits, topics.reset_limits
    stranded, find_stranded = undeclared_topics.stranded, undeclared_topics.find_stranded
    worker_overview, running_messages = worker_overview, running_messages
    ask_worker, live_worker = ask_worker, live_worker
    ask_for_stacks, message_stacks = ask_for_stacks, message_stacks
    measured, history, events = measurements.measured, measurements.history, measurements.events
    annotations_of = measurements.annotations_of
    shared_last_minutes, shared_hour = shared_reads.shared_last_minutes, shared_reads.shared_hour

    listing, search_messages = messages.listing, messages.search_messages
    groups, causes = grouped.groups, grouped.causes
    get, body, sent_id = message_details.get, message_details.body, message_details.sent_id
    follow, status, holds = message_details.follow, message_details.status, message_details.holds

    send, send_many, send_each = sends.send, sends.send_many, sends.send_each
    ensure = sends.ensure
    spend_sends, once = sends.spend_sends, sends.once

    outbox, outbox_as_known, outbox_rows = outboxes.outbox, outboxes.outbox_as_known, outboxes.outbox_rows
    relay_outbox, relay_duties = outboxes.relay_outbox, outboxes.relay_duties
    retry_outbox, delete_outbox = outboxes.retry_outbox, outboxes.delete_outbox

    schedules, schedule, run_schedule = scheduled.schedules, scheduled.schedule, scheduled.run_schedule
    pause_schedule, resume_schedule = scheduled.pause_schedule, scheduled.resume_schedule
    edit_schedule, reset_schedule = scheduled.edit_schedule, scheduled.reset_schedule
    delete_schedule = scheduled.delete_schedule

    deliveries = deliveries_of

    claims, return_claims = claiming.claims, claiming.return_claims

    record, recorded = record_outcomes, recorded

    id_of = actions.id_of
    replay, bury, reschedule = actions.replay, actions.bury, actions.reschedule
    delete, delete_only = actions.delete, actions.delete_only
    cancel, cancel_sent = actions.cancel, actions.cancel_sent
    replay_edited = actions.replay_edited

    replay_all, delete_all, bury_all = bulk_actions.replay_all, bulk_actions.delete_all, bulk_actions.bury_all
    reschedule_all = bulk_actions.reschedule_all
    start_action, stop_action = bulk_actions.start_action, bulk_actions.stop_action
    background_actions = bulk_actions.background_actions
    undo, undoable = undo.undo, undo.undoable
    purge, pause, resume, retire = (
        bulk_actions.purge,
        bulk_actions.pause,
        bulk_actions.resume,
        bulk_actions.retire,
    )


__all__ = [
    "MAX_IDS",
    "ActionResult",
    "Actor",
    "Annotation",
    "BulkProgress",
    "BulkRun",
    "Causes",
    "ClaimStats",
    "Deletion",
    "Deliveries",
    "Filter",
    "Followed",
    "GroupSample",
    "Health",
    "Hold",
    "Limits",
    "Listing",
    "Measurement",
    "MessageCopy",
    "MessageGroup",
    "MessageGroups",
    "MessageIdentity",
    "MessageStacks",
    "Minute",
    "Operations",
    "OutboxRow",
    "Overview",
    "Permission",
    "RunningMessages",
    "ScheduleStats",
    "SearchResult",
    "SlotStats",
    "SlotsStats",
    "SummedMinute",
    "TopicCard",
    "TopicCounters",
    "TopicLimits",
    "TopicMetrics",
    "TopicRule",
    "TopicStats",
    "Trace",
    "UndeclaredTopic",
    "Waiting",
    "WorkerOverview",
    "WorkerStack",
    "WorkerStats",
    "identify",
    "not_found",
    "topic_permission",
]
