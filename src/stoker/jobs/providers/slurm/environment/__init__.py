"""Starts the workers' Python on Slurm: in an environment that is made from a lock file, or in a container."""
