"""What starts the workers' Python on Slurm: an environment made from a lock, or the runtime of a container."""
