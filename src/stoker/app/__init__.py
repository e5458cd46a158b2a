"""The composition root: the order of the stages, caching, lineage, and the Python API."""
