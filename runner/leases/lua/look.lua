-- Who holds a session. KEYS: its leases, all replicas. ARGV: the clock, what an announcement's key begins with.
-- Answers {} when nobody does, else {owner, announcement or '', alive, running, epoch, started_at, now}.
local now = clock(ARGV[1])
local lease = read(KEYS[1])
expire(lease, now)
if lease.owner == '' then
    return {}
end
local until_us = tonumber(redis.call('ZSCORE', KEYS[2], lease.owner) or 0)
local announced = until_us > now and redis.call('GET', ARGV[2] .. lease.owner) or ''
return { lease.owner, announced, lease.alive, lease.running, lease.epoch, lease.started_at, now }
