"""Readers of CSV, JSON Lines, Parquet and TFRecord; each reads and checks all records."""
