"""A sample of requests and answers, as TFRecords of `PredictionLog`."""
