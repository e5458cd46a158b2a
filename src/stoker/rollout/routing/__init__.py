"""In a server: chooses the version for a request, and counts the answers."""
