"""Connects all parts of Stoker: the chain of stages with caching and lineage, and the Python API."""
