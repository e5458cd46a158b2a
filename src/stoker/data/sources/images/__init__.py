"""Images as records: whether a file is one, is complete and upright, and its class."""
