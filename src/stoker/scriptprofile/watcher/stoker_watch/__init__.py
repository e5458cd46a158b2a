"""The watcher: it runs inside the user's process, and must neither break nor slow it down.

It uses only the standard library and modules that the script itself imported, and nothing from the rest of Stoker: the
script's Python may belong to another environment.
"""
