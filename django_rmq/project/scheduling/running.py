"""Schedules in a worker: declared in Redis at its start, and kept one tick ahead by a duty while it runs."""

from __future__ import annotations

from collections.abc import Generator, Mapping

from django_rmq.core.calls import schedules as calls
from django_rmq.core.calls.broker import Broker
from django_rmq.core.consumer.duties import Duty
from django_rmq.core.logs.complaints import Complaints
from django_rmq.core.logs.safe import safe_logger
from django_rmq.core.schedules.stepping import Stepper
from django_rmq.core.words.results import SendResult
from django_rmq.core.words.schedules import Record, Schedule
from django_rmq.exceptions import CallerError, ConfigurationError, UnknownTopic
from django_rmq.project import connections
from django_rmq.project.connections import Purpose
from django_rmq.project.scheduling import conditions, registry
from django_rmq.project.settings import get_config
from django_rmq.project.watching import announcing, telemetry

logger = safe_logger("django_rmq.schedules")
_complain = Complaints(logger)


def declare() -> None:
    """Make Redis' schedules those of this project, and take the steps that are due.

    A schedule whose topic is not in the settings is left as it is in Redis. Raises ``ConfigurationError`` for
    another one that cannot run, and ``ServerTrouble``.
    """
    declared = registry.schedules()
    broker = connections.get_broker("worker")
    known = {record.name: record for record in broker.run(calls.read_schedules())}
    if not declared and not known:
        return
    config = get_config()
    chosen = {name: each for name, each in declared.items() if each.topic in config.topics}
    for name in declared.keys() - chosen.keys():
        _complain(name, f"Schedule {name} does not run: %s", UnknownTopic("its topic is not in the settings"))
    found = [problem for each in chosen.values() for problem in conditions.problems(config, each)]
    if found:
        raise ConfigurationError(" ".join(f"{problem.message} {problem.hint}" for problem in found))
    for name in dict.fromkeys(each.topic for each in chosen.values()):
        try:
            connections.agree(config.topics[name])
        except CallerError as error:
            _complain(name, f"Schedules of topic {name} do not run: %s", error)
    _tell(broker, chosen, known)
    stepper().settle()


def _tell(broker: Broker, declared: Mapping[str, Schedule], known: Mapping[str, Record]) -> None:
    for name, each in declared.items():
        record = known.get(name)
        is_moved = record is None or each.changed(record.override).timing != record.schedule.timing
        answer = broker.run(calls.change_schedule(name, "spec", each.text, from_now=is_moved))
        if answer == "changed":
            logger.info(
                "Schedule %s of topic %s is declared: %s",
                name,
                each.topic,
                each.timing,
                extra={"rmq_event": "schedule_declared", "rmq_topic": each.topic},
            )
    topics = get_config().topics
    for name, record in known.items():
        if name in declared or record.is_removed or record.declared.topic not in topics:
            continue
        broker.run(calls.change_schedule(name, "removed", "1"))
        logger.info(
            "Schedule %s of topic %s is removed, because it is no longer declared",
            name,
            record.declared.topic,
            extra={"rmq_event": "schedule_removed", "rmq_topic": record.declared.topic},
        )


def stepper(purpose: Purpose = "coordinator") -> Stepper:
    """Return what takes the steps of schedules on the connections of ``purpose``."""
    return Stepper(connections.get_broker(purpose), get_config().topics, _announce)


def _announce(topic: str, result: SendResult) -> None:
    announcing.sent(topic, [result])
    telemetry.count_sent(topic, 1)


def duties() -> list[Duty]:
    """Return the duty of a worker. A project without schedules has none."""
    return [_duty] if registry.schedules() else []


def _duty() -> Generator[float, None, None]:
    """Take the steps that are due, as a duty of a worker; while nothing is due, with one request each 5 s."""
    steps = stepper()
    while True:
        yield steps.step()
