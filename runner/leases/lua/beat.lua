-- One beat: the table of rules/lease.py, decided in one step. KEYS: leases of the session, index of the replica.
-- Answers {move, admitted, current, owner, epoch, started_at, now}; the move 'ask' changes nothing and wants turn_ended.
local now, lease_us, keep_ms = clock(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local turn, replica, phase, predecessor = ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local epoch_floor, seat_parked, epoch, started_at = tonumber(ARGV[8]), ARGV[9] == '1', tonumber(ARGV[10]), tonumber(ARGV[11])
local predecessor_ended, turn_ended, left = ARGV[12] == '1', ARGV[13], ARGV[14]

local lease = read(KEYS[1])
expire(lease, now)
local mine = lease.owner == replica
local releasing = { paused = 'pause', parked = 'park', ended = 'end' }

local function stands(who)
    if lease.alive ~= '' then
        return lease.owner == replica and lease.alive == who
    end
    return lease.last_replica == replica and lease.last_turn == who
end

local function ended_move()
    if not stands(turn) then
        return 'refuse_ended'
    end
    if lease.alive ~= '' then
        return phase == 'running' and 'pause' or releasing[phase]
    end
    local again = phase == 'parked' or phase == 'ended' or (phase == 'paused' and not lease.parked)
    return again and releasing[phase] or 'refuse_ended'
end

local function is_stale()
    return epoch > 0 and (epoch <= lease.epoch or epoch < epoch_floor)
end

local function comes_back()
    if phase ~= 'running' or lease.alive ~= '' or (lease.owner ~= '' and not mine) then
        return false
    end
    return epoch > 0 or stands(turn)
end

local function forgotten()
    return left ~= '' and lease.owner == '' and lease.last_turn ~= left and not is_buried(lease.ended, left)
end

local function move()
    local standing = stands(turn)
    local given_up = (phase == 'paused' or phase == 'parked') and predecessor ~= '' and stands(predecessor)
    if is_buried(lease.ended, turn) and not given_up then
        return ended_move()
    end
    if lease.owner ~= '' and not mine then
        return 'refuse_owned'
    end
    if given_up then
        return 'restore'
    end
    if not standing and is_stale() then
        return 'refuse_stale'
    end
    if phase ~= 'running' then
        local forgotten = epoch > 0 and lease.alive == ''
        return (standing or forgotten) and releasing[phase] or 'refuse_stranger'
    end
    if turn_ended ~= '0' and comes_back() then
        return turn_ended == '' and 'ask' or 'refuse_ended'
    end
    if predecessor ~= '' and lease.alive == predecessor and predecessor ~= turn and mine and predecessor_ended then
        return 'swap'
    end
    if lease.alive == '' then
        return forgotten() and 'refuse_forgotten' or 'take'
    end
    if lease.alive == turn then
        return 'renew'
    end
    return lease.running ~= '' and 'refuse_running' or 'hand_over'
end

local function started()
    return epoch > 0 and started_at > 0 and math.min(started_at, now) or now
end

local function taken()
    local again = lease.last_turn == turn
    local same = again and lease.last_replica == replica and epoch_floor <= lease.epoch
    local known = same and lease.epoch or math.max(lease.epoch, epoch_floor) + 1
    return {
        owner = replica, alive = turn, running = turn, expires_at = now + lease_us,
        epoch = epoch > lease.epoch and epoch or known,
        started_at = again and lease.started_at or started(),
        last_turn = turn, last_replica = replica, parked = false,
        ended = again and lease.ended or buried(lease.ended, lease.last_turn),
    }
end

local function kept(paused)
    return {
        owner = replica, alive = paused and turn or '', running = '', expires_at = now + lease_us,
        epoch = math.max(lease.epoch, epoch),
        started_at = lease.last_turn == turn and lease.started_at or started(),
        last_turn = turn, last_replica = replica, parked = not paused,
        ended = buried(buried(lease.ended, predecessor), turn),
    }
end

local chosen = move()
if chosen == 'ask' or string.sub(chosen, 1, 7) == 'refuse_' then
    return { chosen, 0, 0, lease.owner, 0, 0, now }
end

local after
if chosen == 'take' or chosen == 'swap' or chosen == 'hand_over' then
    after = taken()
elseif chosen == 'renew' then
    after = lease
    after.running, after.expires_at = turn, now + lease_us
elseif chosen == 'pause' or (chosen == 'restore' and phase == 'paused') then
    after = kept(true)
elseif chosen ~= 'end' or seat_parked then
    after = kept(false)
else
    after = released(lease, turn, epoch)
end

write(KEYS[1], after, keep_ms)
if after.owner ~= '' then
    index(KEYS[2], KEYS[1], math.ceil(3 * lease_us / 1000))
else
    redis.call('SREM', KEYS[2], KEYS[1])
end
local start = after.owner ~= '' and after.started_at or lease.started_at
return { chosen, 1, after.alive == turn and 1 or 0, after.owner, after.epoch, start, now }
