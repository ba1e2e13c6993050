-- ARGV[3]: the consumer that stays, ARGV[4]: idle ms. Deletes the silent ones that hold nothing; answers their names.
ensure()
local names = {}
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
  local name = member(info, 'name')
  if name ~= ARGV[3] and member(info, 'pending') == 0 and member(info, 'idle') >= tonumber(ARGV[4]) then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, name)
    names[#names + 1] = name
  end
end
return names
