-- Everything of a replica is released. KEYS: index of the replica, its announcement, all replicas.
-- ARGV: the replica, how long a session is remembered. Answers how many sessions it held.
local replica, count = ARGV[1], 0
for _, key in ipairs(redis.call('SMEMBERS', KEYS[1])) do
    if redis.call('TYPE', key).ok == 'string' then
        if named(key) == replica then
            redis.call('DEL', key)
        end
    else
        local lease = read(key)
        if lease.owner == replica then
            write(key, released(lease, lease.alive, 0), tonumber(ARGV[2]))
            count = count + 1
        end
    end
end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('ZREM', KEYS[3], replica)
return count
