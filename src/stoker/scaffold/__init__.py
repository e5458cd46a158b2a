"""`stoker init`: inspects the data and writes the two files of an experiment."""

from stoker.scaffold.write import Scaffolded, default_name, write_experiment

__all__ = ["Scaffolded", "default_name", "write_experiment"]
