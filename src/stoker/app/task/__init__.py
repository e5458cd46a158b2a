"""Code that runs inside a job: tasks, workers, their barrier, and the stage `train` on several processes."""
