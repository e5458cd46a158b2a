"""One file per format: CSV, JSON Lines, Parquet, TFRecord; each record is read and checked."""
