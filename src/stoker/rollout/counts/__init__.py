"""Counts of each version's answers in each stage: servers write them, and readers add them up."""
