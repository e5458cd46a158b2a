"""The watcher: it runs inside the user's process, and must neither break nor slow it down.

It uses only the standard library and what the script has imported itself, and nothing from Stoker:
the script's Python may belong to another environment.
"""
