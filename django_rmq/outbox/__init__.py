"""The outbox: messages of committed transactions as rows of their database, until Redis has them; and their relay.

The sender writes a row in its transaction, and deletes it after the commit, when Redis has the message. If that process
dies, or Redis does not answer, the relay of a worker sends the message and deletes the row.
"""

from django_rmq.outbox.deletion import DirectSend, OutboxSend
from django_rmq.outbox.rows import StoredSend, write

__all__ = ["DirectSend", "OutboxSend", "StoredSend", "write"]
