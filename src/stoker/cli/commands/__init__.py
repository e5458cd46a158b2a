"""One file per command, which parses the arguments, calls `app` and prints the result."""
