"""The model repository, and the code that loads and calls an exported model."""
