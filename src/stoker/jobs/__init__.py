"""Jobs: submits experiments to schedulers, reads the state and the logs of jobs, and stops jobs."""
