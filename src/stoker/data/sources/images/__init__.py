"""Images as records: which file is one, whole, upright, and of which class."""
