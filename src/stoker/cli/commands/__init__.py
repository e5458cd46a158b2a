"""One file a verb: parse the arguments, call `app`, print the result."""
