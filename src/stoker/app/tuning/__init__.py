"""`stoker tune` and `stoker profile` on an experiment: the search, its check, what the lock file changes."""
