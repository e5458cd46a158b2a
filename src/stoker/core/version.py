"""The version of Stoker; the build of the package also reads it from here."""

__version__ = "0.1.0"
