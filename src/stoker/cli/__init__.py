"""The command line: code that all verbs share; `commands` has one file per verb."""
