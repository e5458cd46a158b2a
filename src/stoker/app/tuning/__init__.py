"""`stoker tune`, `stoker tune --check` and `stoker profile` for an experiment."""
