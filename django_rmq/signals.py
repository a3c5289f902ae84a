"""Signals: what happens to messages, for whoever wants to know. Sent by ``send_robust``.

A receiver that raises is logged by Django and stops nothing. ``sender`` is the ``Topic``'s class for all
of them; filter by the argument ``topic`` (its name).

====================  ===========================================================================
signal                arguments, beside ``topic``
====================  ===========================================================================
``message_sent``      ``results``: a list of ``SendResult``; after the server has answered, in the
                      sending process. One signal for all messages of a topic in one call or
                      transaction
``send_failed``       ``results``, ``error``: sends that were waiting for a database commit and did
                      not reach Redis then
``message_merged``    ``results``: those of ``message_sent`` that met a waiting message
====================  ===========================================================================
"""

from __future__ import annotations

from django.dispatch import Signal

message_sent = Signal()
send_failed = Signal()
message_merged = Signal()
