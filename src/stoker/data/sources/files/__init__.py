"""The files of a source: in which order, of which kind, packed how."""
