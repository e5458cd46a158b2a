"""Shadow traffic: a version answers copies of requests; its answers are compared, and not sent to clients."""
