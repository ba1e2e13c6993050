-- Answers generation, floor, length, pending, and whether the group had to be made.
local info, made = ensure()
local acknowledged, pending = floor(info)
return {current(), acknowledged, redis.call('XLEN', stream), pending, made}
