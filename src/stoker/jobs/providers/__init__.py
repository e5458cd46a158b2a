"""Providers: a package for each kind of target; the file `kind.py` in the package defines the kind."""
