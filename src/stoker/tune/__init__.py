"""Makes a training faster: profile and diagnosis, levers, trials, search, ledger, lock file and reports."""
