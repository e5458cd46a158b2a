"""Counts of what each version did in each stage: written by servers and added up."""
