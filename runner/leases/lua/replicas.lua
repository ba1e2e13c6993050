-- The announcements that have not run out. KEYS: all replicas. ARGV: the clock, what an announcement's key begins with.
local now, known = clock(ARGV[1]), {}
for _, replica in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. whole(now), '+inf')) do
    local text = redis.call('GET', ARGV[2] .. replica)
    if text then
        table.insert(known, text)
    end
end
return known
