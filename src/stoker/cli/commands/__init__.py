"""One file per verb: parse the arguments, call `app`, print the result."""
