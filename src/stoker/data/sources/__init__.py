"""Sources: convert the user's data to checked Arrow record batches."""
