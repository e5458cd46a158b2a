"""Used by all rooms: errors, configuration, files and fingerprints."""
