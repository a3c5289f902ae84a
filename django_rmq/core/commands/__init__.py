"""The transitions as values: one plain function per transition, which returns the call that runs it.

A call's signature, meaning, arguments and answer are declared here once. Its keys, and the facts of its
topic, come from the header of the Lua script. ``Broker.run(call)`` runs it at once, ``Pipeline.add(call)``
collects it.

If a call names several members, all belong to its slot.
"""
