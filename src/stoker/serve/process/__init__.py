"""The server process and its workers: start, supervision, end."""
