"""Signals: what happens to messages, for any receiver. Sent by ``send_robust``.

A receiver that raises is logged by Django and stops nothing. ``sender`` is the ``Topic``'s class for all
of them; filter by the argument ``topic`` (its name). Without receivers nothing is done.

=====================  ==========================================================================
signal                 arguments, beside ``topic``
=====================  ==========================================================================
``message_sent``       ``results``: a list of ``SendResult``; after the server has answered, in the
                       sending process. One signal for all messages of a topic in one call or
                       transaction
``send_failed``        ``results``, ``error``: sends that were waiting for a database commit and did
                       not reach Redis then
``remove_failed``      ``results``: a list of ``RemoveResult``, ``error``: removals that were waiting for a
                       database commit and did not reach Redis then
``message_merged``     ``results``: those of ``message_sent`` that met a waiting message
``message_started``    ``messages``: a list of ``Message``, one or what a batch listener gets; just before
                       the listener is called, in its process and thread
``message_committed``  ``messages``: those that were committed, after Redis has confirmed it
``message_failed``     ``failures``: a list of pairs (``Message``, ``Failure``) that raised, returned False or
                       were marked by ``retry`` or ``reject``, after Redis has confirmed it; includes dead ones
``message_dead``       ``failures``: those of ``message_failed`` that are not tried again
``message_replayed``   ``outcomes``: how many by outcome, ``actor``: whose name; after somebody has replayed dead
                       messages, in the process that did it (admin, REST or command)
=====================  ==========================================================================

``message_committed``, ``message_failed`` and ``message_dead`` are sent in the worker process that ran the listener, by one
separate thread for all of them: a slow receiver delays the next signal, but no message. If more than 20,000 messages wait
to be announced, further ones are left out, with a warning. These signals are sent at most once. No signal is sent if
another process ends the delivery (a time-out, the work of a process that died, REST, Spark, a person's action), or if
the confirmation is lost with a connection. Count with the metrics, which miss nothing; react with signals.

Worker processes are forked after listeners and apps were loaded, so connect receivers in ``AppConfig.ready``, as
everywhere in Django. Connections made by a receiver belong to its own process.
"""

from __future__ import annotations

from django.dispatch import Signal

message_sent = Signal()
send_failed = Signal()
remove_failed = Signal()
message_merged = Signal()
message_started = Signal()
message_committed = Signal()
message_failed = Signal()
message_dead = Signal()
message_replayed = Signal()
