"""OpenTelemetry (extra ``otel``): spans, if ``RMQ["TRACING"]`` is on, and metrics, if ``RMQ["METRICS"]["OPENTELEMETRY"]`` is.

Only the API is used: without an SDK set up by the project, nothing is recorded. Names and attributes are those
of the semantic conventions for messaging (``semantic_conventions``).

=============  ========  =======================================================================================
span           kind      when
=============  ========  =======================================================================================
``send T``     producer  a call that sends, outside a transaction
``create T``   producer  a call that sends, inside a transaction
``send T``     client    the messages of a transaction at its commit, with links to their ``create`` spans
``process T``  consumer  a call of a listener
``commit T``   client    confirmed ends of deliveries of one slot, and ``rollback T``: those that failed
=============  ========  =======================================================================================

On topics with IDENTITY "key" the context of the first or second of these travels in the message's headers, as
written by the propagators of the process (``traceparent``), and later spans link to it. They are not its
children, because a message may be merged, wait for days, and be tried again. A topic whose body is the
identity carries only bodies, and a trace in them would keep equal messages from merging, so its spans have no
links.
"""

from django_rmq.observability.telemetry.instruments import count_processed
from django_rmq.observability.telemetry.spans import around, around_async, settled

__all__ = ["around", "around_async", "count_processed", "settled"]
