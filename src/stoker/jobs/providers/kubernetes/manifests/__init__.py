"""The objects of a job as plain values; the module `render` combines those of the other modules."""
