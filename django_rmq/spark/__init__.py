"""RMQ as a PySpark data source: ``format("rmq")`` to read, write, and consume in two phases.

(RMQ is this queue on Redis, not RabbitMQ.) Nothing here imports Django but ``pipelines``, which no other module
imports: executors need the rest of this package, redis-py and pyarrow. The definition of a topic comes from Redis.
``source`` is the entry point. ``source_options``, ``broker_connection`` and ``java``, which also opens sessions, do not import
PySpark.
"""
