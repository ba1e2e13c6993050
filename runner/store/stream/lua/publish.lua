-- ARGV[3]: most entries, ARGV[4]: codec version, then one payload each. Answers generation, floor, ids (none: full).
local info = ensure()
local acknowledged, _, first = floor(info)
local adding, most = #ARGV - 4, tonumber(ARGV[3])
local length = redis.call('XLEN', stream)
if length > 0 and length + adding > most then
  trim(first)
  length = redis.call('XLEN', stream)
end
local ids = {}
if length == 0 or length + adding <= most then
  for i = 5, #ARGV do
    ids[#ids + 1] = redis.call('XADD', stream, '*', ARGV[4], ARGV[i])
  end
end
return {current(), acknowledged, ids}
