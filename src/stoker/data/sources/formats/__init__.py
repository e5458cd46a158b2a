"""One file a format: CSV, JSON Lines, Parquet, TFRecord, each read and checked record by record."""
