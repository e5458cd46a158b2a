"""Batches of tables that are larger than memory, truly shuffled."""
