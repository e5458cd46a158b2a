"""What runs inside of the script's process; it imports nothing of Stoker."""
