"""The outbox: sends of a transaction as rows of its database, until Redis has them; and the relay of what was left.

A row is written in the transaction, and deleted after the commit by the process that sent its message. What
that process leaves behind, because it died or Redis did not answer, the relay sends.
"""

from django_rmq.project.outbox.keeping import Direct, Keeping
from django_rmq.project.outbox.rows import Row, write

__all__ = ["Direct", "Keeping", "Row", "write"]
