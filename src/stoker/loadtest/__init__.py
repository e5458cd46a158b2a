"""Load tests of a model server.

Open loop: requests are due by a schedule that does not depend on answers, and latency counts from the due time. A
generator that waits for an answer before it sends the next request leaves out exactly the requests that a slow server
would have delayed ("coordinated omission").
"""
