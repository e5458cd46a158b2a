"""Analysis of the data: statistics, schema, anomalies, leaks, skew, and a report of all of them."""
