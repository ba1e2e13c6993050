-- KEYS: the stream, its generation, how many entries left it. ARGV[1]: the group, ARGV[2]: a fresh token.
local stream, generation, left, group = KEYS[1], KEYS[2], KEYS[3], ARGV[1]

local function member(flat, name)
  for i = 1, #flat, 2 do
    if flat[i] == name then return flat[i + 1] end
  end
end

local function find()
  if redis.call('EXISTS', stream) == 0 then return nil end
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    if member(info, 'name') == group then return info end
  end
end

local function gone()
  local info = redis.call('XINFO', 'STREAM', stream)
  return string.format('%.0f', (member(info, 'entries-added') or 0) - member(info, 'length'))
end

-- What leaves the stream by a script of ours was acknowledged.
local function trim(first)
  redis.call('XTRIM', stream, 'MINID', first)
  redis.call('SET', left, gone())
end

-- A group that is missing begins at 0, never at the end: what is in the stream was not acknowledged. Where entries left
-- that no script of ours took out, what was published may be gone: the next floor would pass it unread.
local function ensure()
  if redis.call('EXISTS', stream) == 0 or redis.call('EXISTS', generation) == 0 then
    redis.call('SET', generation, ARGV[2])
    redis.call('DEL', left)
  end
  local info, made = find(), 0
  if not info then
    redis.call('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')
    info, made = find(), 1
  end
  local now = gone()
  if (redis.call('GET', left) or '0') ~= now then
    redis.call('SET', generation, ARGV[2])
    redis.call('SET', left, now)
  end
  return info, made
end

local function parts(id)
  local ms, number = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(number)
end

local function before(id)
  local ms, number = parts(id)
  if number > 0 then return string.format('%.0f-%.0f', ms, number - 1) end
  if ms > 0 then return string.format('%.0f-18446744073709551615', ms - 1) end
  return '0-0'
end

local function floor(info)
  local pending = redis.call('XPENDING', stream, group)
  if pending[1] > 0 then return before(pending[2]), pending[1], pending[2] end
  local last = member(info, 'last-delivered-id')
  local ms, number = parts(last)
  return last, 0, string.format('%.0f-%.0f', ms, number + 1)
end

-- Of this server's run too: one that starts anew, or takes over, may lack what was acknowledged to a sender.
local function current()
  local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') or ''
  return redis.call('GET', generation) .. ':' .. run
end

local function counted(entries, consumer)
  local answer = {}
  if #entries == 0 then return answer end
  local counts = {}
  local first, last = entries[1][1], entries[#entries][1]
  for _, row in ipairs(redis.call('XPENDING', stream, group, first, last, '1000000', consumer)) do
    counts[row[1]] = row[4]
  end
  for _, entry in ipairs(entries) do
    table.insert(answer, {entry[1], counts[entry[1]] or 1, entry[2] or {}})
  end
  return answer
end
