"""Gates, whose verdicts can roll a version back: built-in ones, Prometheus queries and Python functions."""
