"""Convert raw values to typed columns: names, types, lengths, missing values."""
