-- Entries for a replica. KEYS: its stream. ARGV: milliseconds that it is kept for, bytes that it may hold, the entries.
local keep_ms, bytes = tonumber(ARGV[1]), tonumber(ARGV[2])
for i = 3, #ARGV do
    redis.call('XADD', KEYS[1], '*', 'e', ARGV[i])
end
local length = redis.call('XLEN', KEYS[1])
while length > 1 and redis.call('MEMORY', 'USAGE', KEYS[1]) > bytes do
    redis.call('XTRIM', KEYS[1], 'MAXLEN', math.floor(length / 2))
    length = redis.call('XLEN', KEYS[1])
end
redis.call('PEXPIRE', KEYS[1], keep_ms)
