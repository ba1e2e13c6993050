-- A named lease is taken or renewed. KEYS: the lease, index of the replica. ARGV: the replica, milliseconds.
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
    return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
index(KEYS[2], KEYS[1], tonumber(ARGV[2]))
return 1
