"""What all other packages use: errors, configuration, files and fingerprints."""
