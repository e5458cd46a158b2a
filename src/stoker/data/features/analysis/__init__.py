"""What the data is: statistics, schema, anomalies, leaks, skew, and the report of them."""
