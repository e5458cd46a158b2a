"""Commands that submit, list, follow and stop jobs, and the commands that run inside a job."""
