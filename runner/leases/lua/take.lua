-- A named lease is taken or renewed. KEYS: the lease, index of the replica. ARGV: the clock, the replica, milliseconds.
local now, ms = clock(ARGV[1]), tonumber(ARGV[3])
local owner, until_us = named(KEYS[1])
if owner ~= ARGV[2] and now < until_us then
    return 0
end
redis.call('SET', KEYS[1], whole(now + ms * 1000) .. ' ' .. ARGV[2], 'PX', ms)
index(KEYS[2], KEYS[1], ms)
return 1
