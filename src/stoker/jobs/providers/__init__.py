"""Providers: one package for each kind of target; its `kind.py` says what it is."""
