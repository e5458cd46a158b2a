"""How the workers' Python starts on Slurm: in an environment made from a lock, or in a container."""
