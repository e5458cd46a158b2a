"""The program in a pod of a job: it joins a start of the job, and runs `stoker job-task` in it."""
