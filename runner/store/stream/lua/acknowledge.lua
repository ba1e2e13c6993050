-- ARGV[3…]: ids. Acknowledges them and lets go of what lies at the floor or below. Answers the floor.
local info = ensure()
for i = 3, #ARGV do
  redis.call('XACK', stream, group, ARGV[i])
end
local acknowledged, _, first = floor(info)
redis.call('XTRIM', stream, 'MINID', first)
return acknowledged
