"""The program that runs in a job's pods: it joins a start of the job, and runs `stoker job-task`."""
