"""Where the step's time goes, what is in its way, and what to do about it."""
