"""What may roll a version back: counts, queries and functions."""
