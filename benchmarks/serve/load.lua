-- wrk's requests: one body over and over. Arguments: file, strict (1 counts every status), headers.
local other = 0

function init(args)
  local file = io.open(args[1], "rb")
  wrk.method = "POST"
  wrk.body = file:read("*a")
  file:close()
  for place = 3, #args do
    local name, value = args[place]:match("^([^:]+): (.*)$")
    wrk.headers[name] = value
  end
  if args[2] == "1" then
    response = function(status, headers, body)
      if status < 200 or status > 299 then
        io.stderr:write("status " .. status .. "\n")
        wrk.thread:stop()
      end
    end
  end
end

function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    'JSON {"requests": %d, "took_us": %d, "failed": %d, "mean_us": %.1f, "p50_us": %d, "p99_us": %d}\n',
    summary.requests, summary.duration, e.connect + e.read + e.write + e.status + e.timeout,
    latency.mean, latency:percentile(50), latency:percentile(99)))
end
