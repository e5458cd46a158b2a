"""Jobs on Slurm: settings, the script for sbatch, and Slurm's programs with their answers."""
