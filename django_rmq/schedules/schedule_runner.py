"""The duty of schedules in a worker: it declares schedules in Redis, and keeps each one tick ahead.

``declare`` runs once when workers start, and the duty while they run. The steps themselves are those of
``core.schedules``, and the schedules of a project are in ``schedules.registry``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from functools import partial

from django_rmq import connections, observability
from django_rmq.conf import get_config
from django_rmq.connections import Purpose
from django_rmq.core.commands import registry as calls
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.consumer.background_jobs import Duty
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.log.throttle import LogThrottle
from django_rmq.core.model.send_results import SendResult
from django_rmq.core.schedules.declarations import Declarations
from django_rmq.core.schedules.stepper import Stepper
from django_rmq.core.topic_registration import register_topics
from django_rmq.exceptions import CallerError, ConfigurationError, UnknownTopic
from django_rmq.schedules import registry, schedule_requirements

logger = safe_logger("django_rmq.schedules")
_complain = LogThrottle(logger)


def declare() -> None:
    """Make Redis' schedules those of this project, and take the steps that are due.

    A schedule whose topic is not in the settings is left as it is in Redis. Raises ``ConfigurationError`` for
    another one that cannot run, and ``ServerTrouble``.
    """
    declared = registry.schedules()
    broker = connections.get_broker("worker")
    # Redis may still hold schedules that the project no longer declares, so both have to be empty.
    if not declared and not broker.run(calls.read_schedules()):
        return
    config = get_config()
    chosen = {name: each for name, each in declared.items() if each.topic in config.topics}
    for name in declared.keys() - chosen.keys():
        _complain(name, f"Schedule {name} does not run: %s", UnknownTopic("its topic is not in the settings"))
    found = [problem for each in chosen.values() for problem in schedule_requirements.problems(config, each)]
    if found:
        raise ConfigurationError(" ".join(f"{problem.message} {problem.hint}" for problem in found))
    for name in dict.fromkeys(each.topic for each in chosen.values()):
        try:
            connections.agree(config.topics[name])
        except CallerError as error:
            _complain(name, f"Schedules of topic {name} do not run: %s", error)
    Declarations(broker, chosen, config.topics).start()
    stepper().settle()


def stepper(purpose: Purpose = "coordinator") -> Stepper:
    """Return what takes the steps of schedules on the connections of ``purpose``."""
    return Stepper(connections.get_broker(purpose), get_config().topics, _announce)


def _announce(topic: str, result: SendResult) -> None:
    observability.announce_sent(topic, [result])
    observability.count_sent(topic, 1)


def _register(broker: Broker, topics: Iterable[str]) -> None:
    """Register the topics of schedules that Redis does not know."""
    for name in topics:
        try:
            register_topics(broker, [get_config().topics[name]])
        except CallerError as error:
            _complain(name, f"Schedules of topic {name} do not run: %s", error)


def duties() -> list[Duty]:
    """Return the duty of a worker that keeps schedules. It ends at once in a project without schedules."""
    broker = connections.get_broker("coordinator")
    # The declarations outlive a step that fails, so they still know the declarations of other workers.
    return [partial(_duty, broker, Declarations(broker, registry.schedules(), get_config().topics))]


def _duty(broker: Broker, declarations: Declarations) -> Generator[float, None, None]:
    """Keep the schedules in Redis those of the live workers, and take the steps that are due.

    While nothing is due, with two requests each 5 s.
    """
    steps = stepper()
    try:
        while True:
            now_ms, records = broker.now_ms(), broker.run(calls.read_schedules())
            if declarations.reconcile(records, now_ms):
                # A server that has lost the schedules may have lost the definitions of their topics as well.
                _register(broker, declarations.topics)
                yield 0.0
            elif declarations.is_idle:
                return
            else:
                yield steps.step_each(records, now_ms)
    except GeneratorExit:
        # The worker ends in good order and reports it, so that schedules that only it declared are removed soon.
        declarations.end()
        raise
