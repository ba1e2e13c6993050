-- ARGV[3]: ids with blanks between. Acknowledges them and lets go of what lies at the floor or below. Answers the floor.
local info = ensure()
local ids = {}
for id in string.gmatch(ARGV[3], '%S+') do
  ids[#ids + 1] = id
  if #ids == 1000 then
    redis.call('XACK', stream, group, unpack(ids))
    ids = {}
  end
end
if #ids > 0 then redis.call('XACK', stream, group, unpack(ids)) end
local acknowledged, _, first = floor(info)
trim(first)
return acknowledged
