"""Places of files: this machine, or a bucket with a cache on this machine."""
