"""Writes and reads logs of sampled requests and answers, as TFRecords of `PredictionLog`."""
