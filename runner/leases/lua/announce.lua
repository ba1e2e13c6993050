-- A replica is known for a while. KEYS: its announcement, all replicas. ARGV: the clock, its id, the text, milliseconds.
local now, ms = clock(ARGV[1]), tonumber(ARGV[4])
redis.call('SET', KEYS[1], ARGV[3], 'PX', ms)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', whole(now))
redis.call('ZADD', KEYS[2], whole(now + ms * 1000), ARGV[2])
redis.call('PEXPIRE', KEYS[2], ms)
