"""Jobs as data: requests, the durable queue, result files, states, failures."""
