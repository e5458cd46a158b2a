"""The code that runs inside the script's process; it imports nothing from Stoker."""
