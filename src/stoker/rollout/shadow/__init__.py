"""Shadow traffic: copies of requests run in a version whose answers no client gets."""
