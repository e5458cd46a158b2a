"""Parts of a serving process that do not depend on requests: shared counters, memory limits, pauses, sockets."""
