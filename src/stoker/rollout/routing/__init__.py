"""In a server: which version takes a request, and how its answers are counted."""
