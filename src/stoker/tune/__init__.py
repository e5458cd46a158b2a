"""Where a step's time goes, what would make it shorter, and the proof that it did."""
