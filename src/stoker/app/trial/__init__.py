"""One setting of an experiment, measured in a process of its own."""
