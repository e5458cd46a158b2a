"""Jobs on Slurm: settings, the script that sbatch takes, Slurm's programs, and what they answer."""
