"""What `stoker init` does: look at the user's data, write the two files that train on it."""

from stoker.scaffold.write import Scaffolded, default_name, write_experiment

__all__ = ["Scaffolded", "default_name", "write_experiment"]
