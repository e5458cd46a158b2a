"""The rules of a script's profile: one file per kind of cost; each finding names its line."""
