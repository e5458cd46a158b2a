"""Runs jobs on Slurm: settings, the script for sbatch, and calls of Slurm's programs."""
