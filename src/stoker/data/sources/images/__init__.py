"""Images as records: check that a file is a complete image that can be decoded, and find its class."""
