"""Jobs: submit, list, follow and stop them, and the command that runs inside of one."""
