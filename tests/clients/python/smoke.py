"""Use the client that openapi-python-client generated from openapi.yaml: send, prepare, commit, roll back, read.

    RMQ_URL=http://127.0.0.1:8000/api/rmq RMQ_TOKEN=... python smoke.py TOPIC

Prints what it saw as JSON. It needs the generated package `rmq_client`, and nothing of django_rmq.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from typing import Any

from rmq_client import AuthenticatedClient
from rmq_client.api.rmq import (
    rmq_commit,
    rmq_messages,
    rmq_prepare,
    rmq_rollback,
    rmq_send,
    rmq_stats,
    rmq_topic,
)
from rmq_client.models import (
    DeliveryFields,
    FailedFields,
    MessageAnswerStateEnum,
    MessageFields,
    PrepareFields,
    Problem,
    RollbackFields,
    SendFields,
    SendsFields,
    SettleFields,
)

topic = sys.argv[1]
client = AuthenticatedClient(base_url=os.environ["RMQ_URL"], token=os.environ["RMQ_TOKEN"], prefix="Token")
consumer = uuid.uuid4()


def take() -> Any:
    """Take one message."""
    taken = rmq_prepare.sync(topic, client=client, body=PrepareFields(consumer=consumer, max_=1, wait=5.0))
    (message,) = taken.messages
    return message


bodies = [{"shop": 1, "n": n} for n in range(3)]
messages = [MessageFields(body=body, priority=100 - n) for n, body in enumerate(bodies)]
sent = rmq_send.sync(topic, client=client, body=SendsFields(messages=messages))
done, failed = take(), take()
commit = SettleFields(deliveries=[DeliveryFields(id=done.id, receipt=done.receipt)])
committed = [rmq_commit.sync(topic, client=client, body=commit) for _ in range(2)]
failure = FailedFields(id=failed.id, receipt=failed.receipt, error="Timeout: no answer", reject=True)
rolled_back = rmq_rollback.sync(topic, client=client, body=RollbackFields(deliveries=[failure]))
dead = rmq_messages.sync(topic, client=client, state=MessageAnswerStateEnum.DEAD)
stats = rmq_stats.sync(client=client)
refused = rmq_send.sync(topic, client=client, body=SendFields(body=1))
assert isinstance(refused, Problem)
unknown = rmq_topic.sync("nothing", client=client)
assert isinstance(unknown, Problem)

print(
    json.dumps(
        {
            "sent": sent.outcomes.to_dict(),
            "taken": [done.body, failed.body],
            "committed": [one.outcomes.to_dict() for one in committed],
            "rolled_back": rolled_back.outcomes.to_dict(),
            "dead": [[one.body, one.error] for one in dead.results],
            "stats": next(one.to_dict() for one in stats.results if one.topic == topic),
            "refused": [refused.code, unknown.code],
        }
    )
)
