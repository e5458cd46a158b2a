"""Tuning of a training: profile and diagnosis, levers, trials, search, ledger, lock file and reports."""
