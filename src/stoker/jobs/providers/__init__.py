"""Providers: one package for each kind of target, which its `kind.py` defines."""
