"""Description of the data (statistics, schema, anomalies), and the transform into the model's inputs."""
