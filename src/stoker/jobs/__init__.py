"""Jobs: an experiment submitted to a scheduler, its state, its logs and its end."""
