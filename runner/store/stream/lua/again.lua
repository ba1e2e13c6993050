-- ARGV[3]: consumer, ARGV[4]: after, ARGV[5]: most. What it holds already, delivered once more.
ensure()
local answer = redis.call('XREADGROUP', 'GROUP', group, ARGV[3], 'COUNT', ARGV[5], 'STREAMS', stream, ARGV[4])
if not answer then return {} end
return counted(answer[1][2], ARGV[3])
