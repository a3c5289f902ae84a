"""RMQ as a PySpark data source: ``format("rmq")`` to read, write, and consume in two phases.

(RMQ is this queue on Redis, not RabbitMQ.) Nothing here imports Django: executors need this package, redis-py and pyarrow.
What a topic is comes from its definition in Redis. ``source`` is the entrance; PySpark itself is imported there
and by what it imports, never by ``options``, ``connection`` and ``java``.
"""
