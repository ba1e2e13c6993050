-- ARGV[3]: consumer, ARGV[4]: idle ms, ARGV[5]: most, ARGV[6]: from. Answers where to go on, entries, ids without body.
ensure()
local answer = redis.call('XAUTOCLAIM', stream, group, ARGV[3], ARGV[4], ARGV[6], 'COUNT', ARGV[5])
local entries, gone = {}, answer[3] or {}
for _, entry in ipairs(answer[2]) do
  if entry then entries[#entries + 1] = entry end
end
return {answer[1], counted(entries, ARGV[3]), gone}
