"""The decoder in C: compiled on first use, kept, and checked before it is used."""
