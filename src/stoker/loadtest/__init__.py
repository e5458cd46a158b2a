"""Load tests of a model server.

Open loop: requests are due by a schedule that answers cannot delay, and latency counts from the due time.
A loop that waits for an answer before the next request leaves out exactly the requests that a slow server
would have delayed ("coordinated omission").
"""
