"""The command line: what is common to all verbs; `commands` has one file a verb."""
