"""The watcher: code that runs inside the script's process and does not import the rest of Stoker."""
