"""The watcher: it runs inside the user's process, and must neither break nor slow it.

Only the standard library and what the script has imported itself are used, and nothing of Stoker:
the script's Python may be of another environment.
"""
