"""The transitions as values: one plain function per transition, which returns the call that runs it.

A call's signature, meaning, arguments and answer are declared here once. Its keys, and what its topic says, come from
the header of the Lua script. ``Broker.run(call)`` runs it at once, ``Pipeline.add(call)`` collects it.

Where a call names several members, all belong to its slot.
"""
