"""Runs on disk: their folders, and which one is continued."""
