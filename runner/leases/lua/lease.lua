-- Put before every script: a session's leases as rules/lease.py has them, with times in whole microseconds.
local TOMBSTONES_KEPT = 16

local function clock(given)
    if given ~= '' then
        return tonumber(given)
    end
    local time = redis.call('TIME')
    return time[1] * 1000000 + time[2]
end

-- Lua's own conversion keeps only fourteen digits.
local function whole(number)
    return string.format('%.0f', number)
end

local function read(key)
    local raw, field = redis.call('HGETALL', key), {}
    for i = 1, #raw, 2 do
        field[raw[i]] = raw[i + 1]
    end
    local lease = {
        owner = field.owner or '',
        alive = field.alive or '',
        running = field.running or '',
        expires_at = tonumber(field.expires_at or 0),
        epoch = tonumber(field.epoch or 0),
        started_at = tonumber(field.started_at or 0),
        last_turn = field.last_turn or '',
        last_replica = field.last_replica or '',
        parked = field.parked == '1',
        ended = {},
    }
    for turn in string.gmatch(field.ended or '', '[^\n]+') do
        table.insert(lease.ended, turn)
    end
    return lease
end

local function write(key, lease, keep_ms)
    redis.call('HSET', key,
        'owner', lease.owner, 'alive', lease.alive, 'running', lease.running,
        'expires_at', whole(lease.expires_at), 'epoch', whole(lease.epoch), 'started_at', whole(lease.started_at),
        'last_turn', lease.last_turn, 'last_replica', lease.last_replica,
        'parked', lease.parked and '1' or '0', 'ended', table.concat(lease.ended, '\n'))
    redis.call('PEXPIRE', key, keep_ms)
end

local function expire(lease, now)
    if lease.owner ~= '' and now >= lease.expires_at then
        lease.owner, lease.alive, lease.running = '', '', ''
    end
end

local function is_buried(ended, turn)
    for _, one in ipairs(ended) do
        if one == turn then
            return true
        end
    end
    return false
end

local function buried(ended, turn)
    if turn ~= '' and not is_buried(ended, turn) then
        table.insert(ended, turn)
        if #ended > TOMBSTONES_KEPT then
            table.remove(ended, 1)
        end
    end
    return ended
end

local function released(lease, turn, epoch)
    return {
        owner = '', alive = '', running = '', expires_at = 0, epoch = math.max(lease.epoch, epoch), started_at = 0,
        last_turn = '', last_replica = '', parked = false, ended = buried(lease.ended, turn),
    }
end

-- What a replica holds is indexed for at least as long as it can hold it.
local function index(key, member, ms)
    redis.call('SADD', key, member)
    if redis.call('PTTL', key) < ms then
        redis.call('PEXPIRE', key, ms)
    end
end

-- Who took a named lease, and until when; nobody until 0.
local function named(key)
    local until_us, owner = string.match(redis.call('GET', key) or '', '^(%d+) (.*)$')
    return owner, tonumber(until_us or 0)
end
