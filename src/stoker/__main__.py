"""Runs the command line: `python -m stoker` is the same as `stoker`."""

from stoker.cli.main import main

if __name__ == "__main__":
    main()
