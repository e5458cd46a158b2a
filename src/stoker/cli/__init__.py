"""The command line: code that all commands share; the folder `commands` has one file per command."""
