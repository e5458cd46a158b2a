"""Load for a model server: when requests are sent, how long their answers take, and who was late.

Open loop: requests are due by a schedule that no answer can hold up, and a request's latency counts
from when it was due. A loop that waits for an answer before it sends on leaves out just those
requests that a slow server would have kept waiting ("coordinated omission").
"""
