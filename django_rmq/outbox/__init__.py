"""The outbox: sends of a transaction as rows of its database, until Redis has them; and the relay of what was left.

A row is written in the transaction, and deleted after the commit by the process that sent its message. What
that process leaves behind, because it died or Redis did not answer, the relay sends.
"""

from django_rmq.outbox.storage import DirectSend, OutboxSend, StoredSend, write

__all__ = ["DirectSend", "OutboxSend", "StoredSend", "write"]
