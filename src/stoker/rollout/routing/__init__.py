"""In a server: which version takes a request, and what became of it."""
