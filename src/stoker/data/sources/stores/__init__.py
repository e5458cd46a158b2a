"""Where files are: on this machine, or in an object store with a cache on this machine."""
