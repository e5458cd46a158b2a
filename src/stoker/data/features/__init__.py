"""Descriptions of the data (statistics, schema, anomalies) and its conversion for the model (transform)."""
