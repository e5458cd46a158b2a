"""What a serving process does besides answering: shared counters, memory limits, pauses, sockets."""
