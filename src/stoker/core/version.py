"""The version of Stoker; the build reads it too."""

__version__ = "0.1.0"
