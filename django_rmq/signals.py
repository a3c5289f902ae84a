"""Signals: what happens to messages, for any receiver. Sent by ``send_robust``.

A receiver that raises is logged by Django and stops nothing. ``sender`` is the ``Topic``'s class for all
of them; filter by the argument ``topic`` (its name). Where nobody is connected nothing is done.

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
``message_committed``  ``messages``: those that have been done, after Redis has confirmed it
``message_failed``     ``failures``: a list of pairs (``Message``, ``Failure``) that raised, returned False or
                       decided so, after Redis has confirmed it; what is dead by it, too
``message_dead``       ``failures``: those of ``message_failed`` that are not tried again
``message_replayed``   ``outcomes``: how many by outcome, ``actor``: whose name; after somebody has replayed dead
                       messages, in the process that did it (admin, REST or command)
=====================  ==========================================================================

``message_committed``, ``message_failed`` and ``message_dead`` are sent in the worker process that ran the listener, by one
thread of its own for all of them: a slow receiver delays the next signal and no message. Beyond 20,000 messages that
wait to be told the rest is left out, with a warning. They are told at most once: what another process ends (a
time-out, the work of a process that died, REST, Spark, a person's act), or an end whose confirmation is lost with
a connection, is told by nobody. Count with the metrics, which miss nothing; react with signals.

Worker processes are forked after listeners and apps were loaded: connect receivers there, in ``AppConfig.ready`` as
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
