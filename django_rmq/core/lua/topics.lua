-- The definitions of topics.
--
-- KEY topics  HASH  topic -> definition

-- script: redefine
-- Write a topic's definition, if it has not changed since it was read.
--
-- KEYS topics
--
-- ARGV[1] topic
-- ARGV[2] before  the definition that was read; empty: none
-- ARGV[3] after
-- ARGV[4] now
--
-- Returns ok | changed

-- check: types
-- Another process may have changed the definition since the caller read it; the caller then begins again.
if (redis.call('HGET', topics, topic) or '') ~= before then return 'changed' end
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', topics, '')
redis.call('HSET', topics, topic, after)
return 'ok'
