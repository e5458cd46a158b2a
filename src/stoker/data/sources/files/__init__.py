"""The files of a source: their order, kind and compression."""
